"""What is kept of a saved tensor: which codec it gets, at which bits, with which random numbers."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from .. import codec
from ..config import Config
from ..offload import PackStream
from ..policies import Bits, Plan, Policy, one_width
from .log_softmax import LogSoftmaxes
from .one_bit import Below, Limits, OneBit, Read
from .per_example import Examples
from .roles import Role

Packs = codec.Packer | Callable[[Tensor], codec.Packed | None]
"""what packs tensors of one kind; a function gives None for one that it does not pack"""


class Encoder:
    """Encodes the saved tensors of one model."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        policy: Policy,
        rank: int,
        log_softmaxes: LogSoftmaxes,
        stream: PackStream | None = None,
    ) -> None:
        """stream: what tensors are rounded on; None for that which computes."""
        self._stream, self._log_softmaxes = stream, log_softmaxes
        self.group_size = config.group_size
        self._by_column = config.layout == "columns"
        self.examples = Examples(model, config.group_size, policy.example_columns > 0, self._by_column)
        self.keys = RoundingKeys(config.seed, rank)
        self._min_numel = max(config.min_numel, 1)
        self.fraction = 1.0
        """of a step's examples that it sees"""
        self._rounds = policy.rounds
        wanted = policy.adapts if config.derive is None else config.derive
        self.may_derive = policy.rounds and wanted and config.estimator == "one-pass"
        """perturbing one tensor does not show what it does through those that are made of it"""
        self._pack = codec.pack_error_bounded if policy.error_bounded else codec.pack

    def of_this_step(self) -> Encoder:
        """The same, with the random numbers of the current step in later ones as well."""
        encoder = copy.copy(self)
        encoder.keys = copy.copy(self.keys)
        return encoder

    def of_part(self, fraction: float) -> Encoder:
        """The same for a part of a step's examples: what it rounds is what the step rounds, though it is smaller."""
        encoder = copy.copy(self)
        encoder._min_numel = max(1, math.ceil(self._min_numel * fraction))
        encoder.fraction = fraction
        return encoder

    def rounds(self, tensor: Tensor) -> bool:
        """Whether a tensor may be rounded, as far as its type and size tell."""
        if not self._rounds or tensor.numel() < self._min_numel:
            return False
        return tensor.is_floating_point() or tensor.is_complex()

    def keeps_alias(self, tensor: Tensor, name: str, role: Role | None, plan: Plan) -> bool:
        """Whether encode() keeps a tensor as it is, and others like it, whatever their elements are."""
        if not self._rounds and tensor.grad_fn is not None:
            return True
        if tensor.nbytes != tensor.untyped_storage().nbytes():
            return False
        if not self._rounds or not self.is_large(tensor):
            return True
        is_exact = role is Role.STATISTIC or (role is Role.ACTIVATION and plan.bits_of(name) is None)
        return is_exact and tensor.is_floating_point()

    def is_large(self, tensor: Tensor) -> bool:
        """Whether a tensor has so many elements that it is not simply stored exactly."""
        return tensor.numel() >= self._min_numel

    def derives(self, tensor: Tensor, name: str, plan: Plan) -> bool:
        """Whether an activation need not be stored if it can be made from others: where it would be rounded."""
        return self.may_derive and self.is_large(tensor) and plan.bits_of(name) is not None

    def encode(
        self, tensor: Tensor, name: str, role: Role | None, plan: Plan, read: Read | None = None
    ) -> Tensor | codec.Packed:
        """What to keep of a tensor that is neither a parameter nor an alias. This is where its codec is chosen.

        role: of a floating tensor that is large enough to be rounded, or Role.SIGN; else None. read: what is read of
        it, if that is less than all.
        """
        if not self._rounds:
            return tensor.detach()
        if tensor.numel() < self._min_numel:
            return codec.exact(tensor)
        if role is Role.ACTIVATION and read is None and tensor.is_floating_point():  # most
            bits = plan.bits_of(name)
            return codec.exact(tensor) if bits is None else self.pack(tensor, bits, self.keys.seed(name))
        if tensor.dtype == torch.bool or role is Role.SIGN:
            return codec.pack_mask(tensor)
        if isinstance(read, OneBit):
            return read.pack(tensor) or codec.exact(tensor)
        if not (tensor.is_floating_point() or tensor.is_complex()):
            count = read.bound if isinstance(read, Below) else None
            return codec.pack_narrow(tensor, count) or codec.exact(tensor)
        if role is Role.BINARY:
            return codec.pack_binary(tensor)
        if role is Role.LOG_SOFTMAX:
            return self._sampled(tensor, name, plan) or codec.exact(tensor)
        bits = plan.bits_of(name) if role is Role.ACTIVATION else None
        if bits is None:
            return codec.exact(tensor)
        return self.pack(tensor, bits, self.keys.seed(name), read if isinstance(read, Limits) else None)

    def _sampled(self, tensor: Tensor, name: str, plan: Plan) -> codec.Packed | None:
        """None where a log-softmax is to be exact. A plan may say so too: its bits are None then."""
        if not self._log_softmaxes.may_sample or plan.bits_of(name) is None:
            return None
        return codec.pack_log_probabilities(tensor, self.keys.seed(name))

    def packer_of(self, tensor: Tensor, name: str, role: Role | None, plan: Plan) -> Packs | None:
        """How encode() packs a tensor, and others like it, of which all is read; None where that takes more."""
        if role is Role.ACTIVATION:
            return self._rounder_of(tensor, plan.bits_of(name))
        if not self._rounds or not self.is_large(tensor) or tensor.nbytes != tensor.untyped_storage().nbytes():
            return None
        if role is Role.BINARY:
            return _binary
        return codec.pack_mask if role is Role.SIGN or tensor.dtype == torch.bool else None

    def _rounder_of(self, tensor: Tensor, bits: Bits) -> codec.Packer | None:
        if type(bits) is not int or not self.rounds(tensor) or self._stream is not None or self._pack is not codec.pack:
            return None
        return codec.packer_of(tensor, bits, self.group_size, self._by_column)

    def pack(self, tensor: Tensor, bits: Bits, seed: int, limits: tuple[float, float] | None = None) -> codec.Packed:
        """Round a tensor, on a stream of its own if there is one. limits: on whose sides its elements are to stay."""
        if limits is not None:
            return self._within(tensor, bits, seed, limits)
        if self._stream is None or not self._stream.takes(tensor):
            if type(bits) is int:
                return self._pack(tensor, bits, seed, self.group_size, self._by_column)
            return self._rounded(tensor, bits, seed)
        packed, ready = self._stream.run(tensor, partial(self._rounded, tensor, bits, seed), attrgetter("payload"))
        return replace(packed, ready=ready)

    def _within(self, tensor: Tensor, bits: Bits, seed: int, limits: tuple[float, float]) -> codec.Packed:
        width = one_width(bits)
        if width is None:
            return codec.pack(tensor, None)
        return codec.pack_within(tensor, width, limits, seed, self.group_size, self._by_column)

    def _rounded(self, tensor: Tensor, bits: Bits, seed: int) -> codec.Packed:
        """Round a tensor to its bits; to their average if they are for examples and the tensor is not made of those."""
        if isinstance(bits, tuple) and self.examples.make_up(tensor):
            return codec.pack(tensor, self.examples.widths_of(tensor, bits), seed, self.group_size, self._by_column)
        width = bits if type(bits) is int else one_width(bits)
        if width is None:
            return codec.pack(tensor, None)
        return self._pack(tensor, width, seed, self.group_size, self._by_column)

    def columns_of(self, tensor: Tensor, fraction: float) -> int:
        """Columns by which a tensor is grouped, if this is a part of it. See codec.columns_of()."""
        return codec.columns_of(tensor, self.group_size, fraction, self._by_column)


def _binary(tensor: Tensor) -> codec.Packed | None:
    """None for a tensor of more than two values."""
    packed = codec.pack_binary(tensor)
    return None if packed.scheme is codec.Scheme.EXACT else packed


class RoundingKeys:
    """The seeds of one rank's rounding, from the job's seed, the rank, the step and the tensor's name alone: the same
    after a resume, different for every step, rank and name."""

    def __init__(self, seed: int, rank: int) -> None:
        self._rank_key = _mix(seed, rank)
        self.step_key = 0
        self._hashes: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """From now on the seeds are those of a step."""
        self.step_key = _mix(self._rank_key, step)

    def seed(self, name: str) -> int:
        """A signed 64-bit integer for a tensor's name."""
        return _mix(self.step_key, self.hash_of(name)) - 2**63

    def hash_of(self, name: str) -> int:
        """The part of a name in its seeds: 64 bits."""
        key = self._hashes.get(name)
        if key is None:
            key = self._hashes[name] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return key


def _mix(key: int, value: int) -> int:
    """A 64-bit key from two (the finaliser of SplitMix64, Steele et al., 2014)."""
    mixed = (key ^ value * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
