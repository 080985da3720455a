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
there are is fixed, so no size waits for a device, and these rows can be decoded alone.

-inf stays, and a group with NaN is NaN, or has NaN where it was if it is one of float16. Sums are of integers, in units
of 2^-24 of m, so they are the same in whatever order a device adds.

A payload holds, in this order: one bit for each word of each group (int32); the logarithm of m of each group, rounded
up (float16); the numbers of the groups of float16 (int32), and their words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .sampling import GROUP, groups_of

MIN_WORDS = 1024
"""of a row: of fewer, most groups would have likely words"""
_SHARE = 64  # one of so many groups has a float16 for each word
AVERAGE_BITS = 1 + 16 / _SHARE
"""for a word"""
_AT_ONCE = 1 << 21
"""elements that are sampled at a time, so that nothing of the size of the tensor is there beside it"""
_AT_ONCE_ELSEWHERE = 1 << 25
"""the same on an accelerator, whose kernels take longer to start"""
_RANKED = 4096  # groups that are ranked together at most, but for those of one row


class _Parts(NamedTuple):
    """Those of a payload, which they share their memory with."""

    bits: Tensor
    """int32 [groups]"""
    logarithms: Tensor
    """float16 [groups]: of the largest probability of each"""
    numbers: Tensor
    """int32 [wide]: of the groups of float16, among all"""
    wide: Tensor
    """float16 [wide, GROUP]: their words"""


def ranked_rows(words: int) -> int:
    """Rows whose groups are ranked together; a payload is decoded by multiples of them."""
    return max(1, _RANKED // groups_of(1, words))


def _wide_of(rows: int, words: int) -> int:
    """How many groups of some rows have a float16 for each word."""
    chunks, rest = divmod(rows, ranked_rows(words))
    return chunks * _share_of(ranked_rows(words), words) + _share_of(rest, words)


def _share_of(rows: int, words: int) -> int:
    """The same of rows that are ranked together."""
    return -(-groups_of(rows, words) // _SHARE)


def total_bytes(rows: int, words: int) -> int:
    """Bytes of the payload of log-probabilities [rows, words]."""
    groups = groups_of(rows, words)
    return 4 * groups + _aligned(2 * groups) + (4 + 2 * GROUP) * _wide_of(rows, words)


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % 4


def _parts(payload: Tensor, rows: int, words: int) -> _Parts:
    groups = groups_of(rows, words)
    wide, start = _wide_of(rows, words), 4 * groups + _aligned(2 * groups)
    return _Parts(
        payload[: 4 * groups].view(torch.int32),
        payload[4 * groups : 6 * groups].view(torch.float16),
        payload[start : start + 4 * wide].view(torch.int32),
        payload[start + 4 * wide :].view(torch.float16).view(wide, GROUP),
    )


def pack(x: Tensor, seed: int) -> Tensor:
    """Sample log-probabilities [rows, words], contiguous and of a float type, into one uint8 buffer."""
    rows, words = x.shape
    payload = x.new_empty(total_bytes(rows, words), dtype=torch.uint8)
    parts = _parts(payload, rows, words)
    payload[6 * len(parts.bits) : 4 * len(parts.bits) + _aligned(2 * len(parts.bits))] = 0
    step = ranked_rows(words)
    step *= max(1, (_AT_ONCE if x.is_cpu else _AT_ONCE_ELSEWHERE) // (step * words))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        some = x[first:last]
        if x.dtype == torch.float64:  # what is stored has fewer bits than a float32
            some = some.float()
        groups = slice(groups_of(first, words), groups_of(last, words))
        is_wide = slice(_wide_of(first, words), _wide_of(last, words))
        variance = ops.sample(some, seed, groups.start, parts.bits[groups], parts.logarithms[groups])
        numbers = _highest(variance, groups_of(ranked_rows(words), words))
        places, is_word = _places(numbers, words)
        parts.numbers[is_wide] = numbers + groups.start
        parts.wide[is_wide] = torch.where(is_word, some.view(-1)[places], -torch.inf)
    return payload


def _highest(variance: Tensor, step: int) -> Tensor:
    """int64: the numbers, among these groups, of those with the largest variance of each ``step``."""
    count = len(variance) // step
    first = torch.arange(0, count * step, step, device=variance.device).unsqueeze(1)
    whole = variance[: count * step].view(count, step).topk(-(-step // _SHARE), sorted=False).indices + first
    rest = variance[count * step :]
    last = rest.topk(-(-len(rest) // _SHARE), sorted=False).indices + count * step
    return torch.cat((whole.view(-1), last))


def _places(numbers: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """([len(numbers), GROUP]: where the words of some groups are among all words; which of these their rows have)."""
    groups = groups_of(1, words)
    numbers = numbers.long().unsqueeze(1)
    in_row = numbers % groups * GROUP + torch.arange(GROUP, device=numbers.device)
    is_word = in_row < words
    return numbers // groups * words + in_row.clamp(max=words - 1), is_word


def unpack(payload: Tensor, rows: int, words: int, dtype: torch.dtype) -> Tensor:
    """What pack() made of log-probabilities: [rows, words] of ``dtype``."""
    out = torch.empty(rows, words, dtype=dtype, device=payload.device)
    unpack_rows(payload, rows, 0, out)
    return out


def unpack_rows(payload: Tensor, rows: int, first: int, out: Tensor) -> None:
    """Some of the rows. out: [rows from ``first`` on, words], written; ``first`` is a multiple of ranked_rows(), and so
    is what comes after the last one, if any does.

    rows: of all that is packed.
    """
    count, words = out.shape
    if out.dtype == torch.float64:  # more than is stored
        values = out.new_empty(out.shape, dtype=torch.float32)
        unpack_rows(payload, rows, first, values)
        out.copy_(values)
        return
    parts = _parts(payload, rows, words)
    start, stop = groups_of(first, words), groups_of(first + count, words)
    ops.sampled_words(parts.bits[start:stop], parts.logarithms[start:stop], out)
    is_wide = slice(_wide_of(first, words), _wide_of(first + count, words))
    places, is_word = _places(parts.numbers[is_wide] - start, words)
    # a word that is none stands for the last one of its row, which the same group has
    wide, last = parts.wide[is_wide], (words - 1) % GROUP
    out.view(-1)[places] = torch.where(is_word, wide, wide[:, last : last + 1]).to(out.dtype)
