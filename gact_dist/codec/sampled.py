"""Log-probabilities in about 1.8 bits each: of a log-softmax, from which its backward takes nothing but exp().

[Note: sampled] The gradient at the logits is the softmax minus the targets, so what counts is exp() of what is stored.
Groups are 32 words of a row. A word of a group comes back with the largest probability m of the group, or with
probability zero: with m by a chance of p / m, which makes p of it on average, whatever the others do. So there is no
bias, and one bit a word. The chances of a group are drawn together, by systematic sampling (Madow, The Annals of
Mathematical Statistics, 1949): with c the running sum of p / m and one random number u for the group, those words are
chosen in which c + u passes an integer. Thus the sum of a group is off by less than m.

The squared error of a group is the sum of p (m - p) on average. Where that is largest, in one of 64 groups, the
logarithm of every word is a float16, in place of the one bit: of a probability near one, whose distance from one is the
gradient, that is as good as exact. Which groups these are is found by ranking those of some rows at a time; how many
there are is fixed, so no size waits for a device.

-inf stays, and a group with NaN is NaN. Sums are of integers, in units of 2^-24 of m, so they are the same in whatever
order a device adds.

A payload holds, in this order: one bit for each word of each group (uint8); the logarithm of m of each group, rounded
up (float16); and for some rows each the numbers of the groups of float16 (int32), and their words. Everything is done
for some rows at a time, so nothing of the size of the tensor is there beside it. An accelerator takes more rows at a
time, and so ranks more groups together: its payloads are not those of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .philox import philox

GROUP = 32
"""words; of more the error grows faster than bytes fall (benchmarks/results/README.md)"""
MIN_WORDS = 1024
"""of a row: of fewer, most groups would have likely words"""
_SHARE = 64  # one of so many groups has a float16 for each word
AVERAGE_BITS = 1 + 16 / _SHARE
"""for a word"""
_CHUNK_NUMEL = 2**17  # of which a few copies are in the caches of a processor
_CHUNK_NUMEL_ELSEWHERE = 2**22  # of an accelerator, whose kernels take longer to start
_ONE = 24  # a probability of m is 2**_ONE
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Form:
    """Where the parts of a payload are, in bytes."""

    rows: int
    words: int
    groups: int
    """of a row; the last one may be short"""
    rows_at_once: int

    @property
    def logarithms_start(self) -> int:
        return self.rows * self.groups * (GROUP // 8)

    @property
    def wide_start(self) -> int:
        nbytes = self.logarithms_start + 2 * self.rows * self.groups
        return nbytes + -nbytes % 4

    @property
    def total_bytes(self) -> int:
        return self.wide_start + sum(chunk.wide_bytes for chunk in self.chunks())

    def chunks(self) -> Iterator[_Chunk]:
        """In order."""
        start = self.wide_start
        for first in range(0, self.rows, self.rows_at_once):
            chunk = _Chunk(first, min(self.rows_at_once, self.rows - first), self.groups, start)
            start += chunk.wide_bytes
            yield chunk


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows."""

    first: int
    rows: int
    groups: int
    """of a row"""
    wide_start: int

    @property
    def wide(self) -> int:
        """How many groups have a float16 for each word."""
        return -(-self.rows * self.groups // _SHARE)

    @property
    def wide_bytes(self) -> int:
        return (4 + 2 * GROUP) * self.wide

    @property
    def in_rows(self) -> slice:
        return slice(self.first, self.first + self.rows)

    @property
    def in_groups(self) -> slice:
        return slice(self.first * self.groups, (self.first + self.rows) * self.groups)

    def bits_of(self, payload: Tensor) -> Tensor:
        """uint8."""
        groups = self.in_groups
        return payload[groups.start * (GROUP // 8) : groups.stop * (GROUP // 8)]

    def numbers_of(self, payload: Tensor) -> Tensor:
        """int32: of the groups of float16, within the chunk."""
        return payload[self.wide_start : self.wide_start + 4 * self.wide].view(torch.int32)

    def wide_of(self, payload: Tensor) -> Tensor:
        """float16 [wide, GROUP]."""
        nbytes = payload[self.wide_start + 4 * self.wide : self.wide_start + self.wide_bytes]
        return nbytes.view(torch.float16).view(-1, GROUP)


def _form(rows: int, words: int, device: torch.device) -> _Form:
    groups = -(-words // GROUP)
    most = _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ELSEWHERE
    return _Form(rows, words, groups, min(rows, max(1, most // (groups * GROUP))))


def total_bytes(rows: int, words: int, device: torch.device) -> int:
    """Bytes of the payload of log-probabilities [rows, words]."""
    return _form(rows, words, device).total_bytes


def _logarithms(payload: Tensor, form: _Form) -> Tensor:
    """float16 [rows * groups, 1]: of the largest probability of each group."""
    nbytes = 2 * form.rows * form.groups
    return payload[form.logarithms_start : form.logarithms_start + nbytes].view(torch.float16).unsqueeze(1)


def pack(x: Tensor, seed: int) -> Tensor:
    """Sample log-probabilities [rows, words], contiguous and of a float type, into one uint8 buffer."""
    rows, words = x.shape
    form = _form(rows, words, x.device)
    payload = x.new_empty(form.total_bytes, dtype=torch.uint8)
    logarithms = _logarithms(payload, form)
    payload[form.logarithms_start + logarithms.nbytes : form.wide_start] = 0
    starts = _starts(form.rows * form.groups, seed, x.device)
    work = _Work(x, form)
    for chunk in form.chunks():
        values = work.grouped(x[chunk.in_rows])
        largest = logarithms[chunk.in_groups]
        largest.copy_(_rounded_up(values.amax(1, True).float()))
        shares = torch.sub(values, largest.float(), out=work.shares[: len(values)]).exp_()  # p / m
        _pack_wide(values, largest, shares, chunk, payload)
        passed = work.passed[: len(values)].copy_(shares.mul_(2.0**_ONE).round_())
        torch.cumsum(passed, 1, out=passed).add_(starts[chunk.in_groups])
        passed.bitwise_right_shift_(_ONE)
        chosen = work.chosen[: len(values)]
        torch.ne(passed[:, 1:], passed[:, :-1], out=chosen[:, 1:])
        torch.ne(passed[:, 0], 0, out=chosen[:, 0])
        chunk.bits_of(payload).copy_(ops.pack_mask(chosen.view(-1)))
    return payload


def _pack_wide(values: Tensor, largest: Tensor, shares: Tensor, chunk: _Chunk, payload: Tensor) -> None:
    """The groups that have a float16 for each word. values: [groups, GROUP]. largest: of each, as it is stored."""
    spread = shares.sum(1) - torch.linalg.vector_norm(shares, dim=1).square_()
    variance = spread.mul_(largest.float().squeeze(1).mul_(2.0).exp_())
    numbers = variance.topk(chunk.wide, sorted=False).indices
    chunk.numbers_of(payload).copy_(numbers)
    chunk.wide_of(payload).copy_(values[numbers])


class _Work:
    """Memory for what is computed of some rows: to ask for it again for the next ones takes longer than to use it."""

    def __init__(self, x: Tensor, form: _Form) -> None:
        size = form.rows_at_once * form.groups, GROUP
        self.shares = x.new_empty(size, dtype=torch.float32)
        self.passed = x.new_empty(size, dtype=torch.int32)
        self.chosen = x.new_empty(size, dtype=torch.bool)
        whole = form.words == form.groups * GROUP
        # a short group has words of probability zero
        self._padded = None if whole else x.new_full((form.rows_at_once, form.groups * GROUP), -torch.inf)

    def grouped(self, x: Tensor) -> Tensor:
        """Some rows as [rows * groups, GROUP]."""
        if self._padded is not None:
            padded = self._padded[: len(x)]
            padded[:, : x.shape[1]] = x
            x = padded
        return x.view(-1, GROUP)


def unpack(payload: Tensor, rows: int, words: int, dtype: torch.dtype) -> Tensor:
    """What pack() made of log-probabilities: [rows, words] of ``dtype``."""
    form = _form(rows, words, payload.device)
    logarithms = _logarithms(payload, form)
    whole = words == form.groups * GROUP
    out = torch.empty(rows, words, dtype=dtype, device=payload.device)
    work = out if whole else out.new_empty(form.rows_at_once, form.groups * GROUP)
    for chunk in form.chunks():
        largest = logarithms[chunk.in_groups].to(dtype)
        zero = torch.full_like(largest, -torch.inf).masked_fill_(largest.isnan(), torch.nan)
        count = chunk.rows * form.groups
        chosen = ops.unpack_mask(chunk.bits_of(payload), count * GROUP, torch.bool).view(count, GROUP)
        values = (work[chunk.in_rows] if whole else work[: chunk.rows]).view(count, GROUP)
        torch.where(chosen, largest, zero, out=values)
        values[chunk.numbers_of(payload).long()] = chunk.wide_of(payload).to(dtype)
        if not whole:
            out[chunk.in_rows] = work[: chunk.rows, :words]
    return out


def _rounded_up(x: Tensor) -> Tensor:
    """To float16, finite unless it is NaN."""
    nearest = x.to(torch.float16)
    above = (x + x.abs() * 2.0**-11 + 2.0**-25).to(torch.float16)
    limit = torch.finfo(torch.float16).max
    return torch.where(nearest >= x, nearest, above).clamp(-limit, limit)


def _starts(groups: int, seed: int, device: torch.device) -> Tensor:
    """A random number of each group, 0 .. 2^24 - 1 in int32 [groups, 1]."""
    counter = torch.arange(-(-groups // 4), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox([counter & _WORD, counter >> 32, zero, zero + 1], seed)
    return torch.stack(words, 1).view(-1)[:groups].bitwise_right_shift_(32 - _ONE).to(torch.int32).unsqueeze(1)
