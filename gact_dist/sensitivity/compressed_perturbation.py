"""Sensitivity where one block keeps most of what the model keeps: no tensor is held exactly.

[Note: compressed perturbation] The one pass holds the block that it differentiates exactly, and the second derivative
of a section of it besides. Where one block keeps most of what is kept, and the batch cannot be measured in parts, that
is more than the untouched job holds: 332 MB for two layers of graph attention that hold 178. There the model runs once
as in a step, in the widths of the current plan but three bits at least. Its backward then runs once as it is, with
gradient g, and once for each tensor l, which is rounded once more, to a bit less; of what it saved, h', only the
payload is replaced. The second rounding is independent of the first and its variance is known, so |g_l - g|^2 estimates
what tensor l adds to the gradient at these bits, as GACT (Liu et al., ICML 2022, section 4) has it, and

    c_l(b) = |g_l - g|^2 var_b(h) / var_p(h')

with var_b the variance of rounding to b bits, summed over a tensor; that of h itself is taken when it is packed. This
takes the memory of a step and two gradients of the parameters, and the time of a forward and of a backward for each
tensor and one more. So some tensors are measured in a step of the job, others in the next, on the examples of each:
nothing but what was found is carried over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import codec
from ..hooks import SavedTensorHooks, Stored, decoded
from ..policies import Plan, one_width
from .autograd_graph import backward, nodes_below, parameters_among, scalar
from .checkpoint import measurable
from .isolation import untouched
from .measuring_mode import MeasuringMode
from .perturbation import rounding_of, square_distance, widest_inexact

_LEAST_BITS = 3
"""of what is rounded once more to a bit less: with one bit the gradient would not respond linearly"""
_A_STEP = 2
"""tensors measured in one step of the job: a forward and three backwards in addition to its own"""


class Perturbed(NamedTuple):
    """What was found of one saved tensor."""

    numel: int
    itemsize_bits: int
    variance: Tensor
    """float64 [8]: that it adds to the gradient if stored in 1, 2 .. 8 bits"""


class CompressedPerturbation:
    """The measurement of one model. See [Note: compressed perturbation]."""

    def __init__(self, hooks: SavedTensorHooks, model: nn.Module, seed: int, fraction: float) -> None:
        """seed, fraction: as for one_pass.measure."""
        self._hooks, self._model, self._seed, self._fraction = hooks, model, seed, fraction
        self._encoder = hooks.encoder.of_part(fraction)
        self.found: dict[str, Perturbed] = {}
        """by name"""

    def go_on(self, forward: Callable[[], Any], in_one_step: bool) -> bool:
        """Measure all that is left, or what one step has time for; whether that was all.

        forward: as for one_pass.measure.
        """
        kept: dict[str, tuple[Stored, Perturbed]] = {}

        def note(handle: Stored, tensor: Tensor) -> None:
            if handle.name not in self.found and _is_rounded(handle):
                rounding = self._rounding_of(tensor.detach())
                kept[handle.name] = handle, Perturbed(tensor.numel(), 8 * tensor.element_size(), rounding)

        plan = _at_least(_LEAST_BITS, self._hooks.plan)
        mode = MeasuringMode(differentiable=False)
        with untouched(self._model), measurable(mode):
            with self._hooks.rehearsal(plan, fraction=self._fraction, on_kept=note), mode:
                result = forward()
            root = scalar(mode.root_of(result))
            del result
            left = [name for name, (handle, _) in kept.items() if _is_rounded(handle)]
            now = left[:_A_STEP] if in_one_step else left
            leaves = parameters_among(nodes_below([root]))

            def gradient() -> list[Tensor | None]:
                with backward():
                    return list(torch.autograd.grad(root, leaves, retain_graph=True, allow_unused=True))

            exact = gradient() if now else []
            for name in now:
                handle, item = kept[name]
                with self._rounded_again(handle, plan) as variance:
                    scale = square_distance(gradient(), exact) / variance if variance > 0.0 else 0.0
                self.found[name] = item._replace(variance=item.variance * scale)
        return len(now) == len(left)

    def _rounding_of(self, tensor: Tensor) -> Tensor:
        return rounding_of(tensor, None, self._encoder, fraction=self._fraction)

    @contextmanager
    def _rounded_again(self, handle: Stored, plan: Plan) -> Iterator[float]:
        """Within the context a handle gives what it has rounded to a bit less; the variance of that."""
        payload = handle.payload
        limits = payload.limits if isinstance(payload, codec.Packed) else None
        tensor = decoded(payload)
        rounding = self._rounding_of(tensor)
        bits = widest_inexact((one_width(plan.bits_of(handle.name)) or codec.MAX_BITS) - 1, rounding)
        before = handle.exchange(self._encoder.pack(tensor, bits, self._seed + len(self.found), limits))
        del tensor
        try:
            yield float(rounding[bits - 1])
        finally:
            handle.exchange(before)


def _is_rounded(handle: Stored) -> bool:
    payload = handle.payload
    return isinstance(payload, codec.Packed) and payload.is_rounded


def _at_least(bits: int, plan: Plan) -> Plan:
    """A plan in which each tensor that is rounded has one width, and no less than so many bits."""

    def raised(width: int | None) -> int | None:
        return None if width is None else max(bits, width)

    widths: Mapping[str, int | None] = {name: raised(one_width(width)) for name, width in plan.bits.items()}
    return Plan(widths, raised(plan.default))
