"""The operators sample and sampled_words in plain PyTorch, for devices without kernels of their own.

csrc/ has the same but for exp(), of which the last bits depend on the library, so that now and then another word is
chosen; and its variances have squares of fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .philox import philox

GROUP = 32
"""words; of more the error grows faster than bytes fall (benchmarks/results/README.md)"""
_CHUNK_NUMEL = 2**17  # of which a few copies are in the caches of a processor
_CHUNK_NUMEL_ELSEWHERE = 2**22  # of an accelerator, whose kernels take longer to start
_ONE = 24  # a probability of the largest is 2**_ONE
_WORD = 0xFFFFFFFF


def groups_of(rows: int, words: int) -> int:
    """How many groups; the last one of a row may be short."""
    return rows * -(-words // GROUP)


def check_groups(words: Tensor, bits: Tensor, logarithms: Tensor, name: str) -> None:
    """Raise ValueError unless ``words`` is [rows, words] without gaps, and the others have an element a group."""
    if words.dim() != 2 or not words.is_contiguous() or words.numel() == 0:
        raise ValueError(
            f"{name} has the shape {tuple(words.shape)} and the strides {words.stride()}, expected rows of words "
            "without gaps; codec.pack_log_probabilities takes any shape"
        )
    expected = groups_of(*words.shape)
    for each, dtype in ((bits, torch.int32), (logarithms, torch.float16)):
        if each.dtype != dtype or each.numel() != expected or not each.is_contiguous():
            raise ValueError(
                f"got {each.numel()} elements of {each.dtype}, expected {expected} of {dtype}, one a group"
            )


def sample(x: Tensor, seed: int, first: int, bits: Tensor, logarithms: Tensor) -> Tensor:
    """Draw the words of each group that come back as its largest.

    Args:
        x: [rows, words] log-probabilities of a float type, contiguous.
        seed: 64-bit integer that selects the random numbers.
        first: the number of the first group, where these are some of all rows.
        bits: int32 [groups]; written: bit i of a group is word i.
        logarithms: float16 [groups]; written: of the largest of each, rounded up.

    Returns:
        float32 [groups]: what each adds to the expected squared error of the probabilities, in a unit of its own.
    """
    check_groups(x, bits, logarithms, "x")
    variance = x.new_empty(bits.numel(), dtype=torch.float32)
    starts = _starts(first, bits.numel(), seed, x.device)
    weights = torch.ones(GROUP, dtype=torch.int64, device=x.device) << torch.arange(GROUP, device=x.device)
    for rows, groups in _chunks(x.shape[0], x.shape[1], x.device):
        values = _grouped(x[rows])
        largest = _rounded_up(values.amax(1, True).float())
        logarithms[groups] = largest.squeeze(1)
        shares = (values.float() - largest.float()).exp()  # p / m
        spread = shares.sum(1) - torch.linalg.vector_norm(shares, dim=1).square()
        variance[groups] = (spread * largest.float().squeeze(1).mul(2.0).exp()).nan_to_num(0.0)
        passed = (shares.nan_to_num(0.0) * 2.0**_ONE).round().to(torch.int32)
        passed = (passed.cumsum(1, dtype=torch.int32) + starts[groups]).bitwise_right_shift(_ONE)
        before = torch.nn.functional.pad(passed[:, :-1], (1, 0))
        bits[groups] = ((passed != before) * weights).sum(1).to(torch.int32)
    return variance


def sampled_words(bits: Tensor, logarithms: Tensor, out: Tensor) -> None:
    """What sample() left of each word: the largest of its group, or -inf. out: [rows, words] of a float type, written.

    A group whose largest is NaN is NaN.
    """
    check_groups(out, bits, logarithms, "out")
    places = torch.arange(GROUP, dtype=torch.int32, device=out.device)
    words = out.shape[1]
    for rows, groups in _chunks(out.shape[0], out.shape[1], out.device):
        largest = logarithms[groups].to(out.dtype).unsqueeze(1)
        zero = torch.full_like(largest, -torch.inf).masked_fill_(largest.isnan(), torch.nan)
        chosen = bits[groups].unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1).bool()
        out[rows] = torch.where(chosen, largest, zero).view(rows.stop - rows.start, -1)[:, :words]


def _chunks(rows: int, words: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(rows, their groups) that are worked on together: nothing of the size of the tensor is there beside it."""
    groups = groups_of(1, words)
    most = _CHUNK_NUMEL if device.type == "cpu" else _CHUNK_NUMEL_ELSEWHERE
    step = max(1, most // (groups * GROUP))
    for first in range(0, rows, step):
        last = min(rows, first + step)
        yield slice(first, last), slice(first * groups, last * groups)


def _grouped(x: Tensor) -> Tensor:
    """Some rows as [groups, GROUP]; a short group has words of probability zero."""
    missing = -x.shape[1] % GROUP
    if missing:
        x = torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
    return x.view(-1, GROUP)


def _rounded_up(x: Tensor) -> Tensor:
    """To float16, finite unless it is NaN."""
    nearest = x.to(torch.float16)
    above = (x + x.abs() * 2.0**-11 + 2.0**-25).to(torch.float16)
    limit = torch.finfo(torch.float16).max
    return torch.where(nearest >= x, nearest, above).clamp(-limit, limit)


def _starts(first: int, groups: int, seed: int, device: torch.device) -> Tensor:
    """A random number of each group from ``first`` on, 0 .. 2^24 - 1 in int32 [groups, 1]."""
    counter = torch.arange(first // 4, -(-(first + groups) // 4), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = philox([counter & _WORD, counter >> 32, zero, zero + 1], seed)
    numbers = torch.stack(words, 1).view(-1)[first % 4 : first % 4 + groups]
    return numbers.bitwise_right_shift_(32 - _ONE).to(torch.int32).unsqueeze(1)
