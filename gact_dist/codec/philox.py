"""Philox4x32-10 (Salmon et al., SC 2011), and the 16 random bits of each element, in plain PyTorch on any device."""

import torch
from torch import Tensor

PHILOX_BLOCK = 256  # elements that share 16 counters
_WORD = 0xFFFFFFFF


def philox(counters: Tensor, seed: int) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011) with key ``seed`` and counter (low32, high32, 0, 0).

    Args:
        counters: int64 tensor of any shape.
        seed: 64-bit integer; its two's complement halves are the key words.

    Returns:
        Four int64 tensors of that shape with values in 0..2^32-1.
    """
    zeros = torch.zeros_like(counters)
    return philox_words(
        [counters & _WORD, (counters >> 32) & _WORD, zeros, zeros], (seed & _WORD, (seed >> 32) & _WORD)
    )


def philox_words(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 of four counter words (int64 tensors, values below 2^32) under two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64; their 32-bit halves are still correct.
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def random16(first_element: int, count: int, seed: int, device: torch.device) -> Tensor:
    """The random numbers 0..65535 of elements first_element .. first_element + count - 1, int32 [count]."""
    first_block = first_element // PHILOX_BLOCK
    blocks = (first_element + count + PHILOX_BLOCK - 1) // PHILOX_BLOCK - first_block
    counters = torch.arange(blocks * 16, device=device, dtype=torch.int64) + first_block * 16
    words = [word.view(blocks, 16) for word in philox(counters, seed)]
    # Four elements share a word; the 16 bits of each begin at a different byte of it.
    parts = [((word >> shift) | (word << (32 - shift))) & 0xFFFF for word in words for shift in (0, 8, 16, 24)]
    start = first_element - first_block * PHILOX_BLOCK
    return torch.stack(parts, dim=1).reshape(-1)[start : start + count].to(torch.int32)
