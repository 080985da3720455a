"""Philox4x32-10 (Salmon et al., SC 2011), and the eight random bits of each element, in plain PyTorch on any device."""

import torch
from torch import Tensor

PHILOX_ROWS = 8  # of a pair of columns, whose 16 elements share a counter
_WORD = 0xFFFFFFFF


def philox(counter: list[Tensor], seed: int) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011) of four counter words, with the two halves of ``seed`` as its key.

    Args:
        counter: four int64 tensors that broadcast together, values 0..2^32-1.
        seed: 64-bit integer; its two's complement halves are the key words.

    Returns:
        Four int64 tensors with values 0..2^32-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # int64 products wrap modulo 2^64; their 32-bit halves are still correct.
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def random_bytes(first_row: int, rows: int, width: int, seed: int, device: torch.device) -> Tensor:
    """The random numbers 0..255 of rows first_row .. first_row + rows - 1 of ``width`` elements, int32 [rows, width].

    The counter (column / 2, row / 8 modulo 2^32, 0, row / 8 / 2^32) makes the bytes of 8 rows of two columns: those of
    rows 4 q .. 4 q + 3 of its column number k are the bytes of output word 2 q + k. ``first_row`` is a multiple of 8.
    """
    blocks = torch.arange(-(-rows // PHILOX_ROWS), device=device, dtype=torch.int64) + first_row // PHILOX_ROWS
    blocks = blocks.unsqueeze(1)
    pairs = torch.arange(width // 2, device=device, dtype=torch.int64)
    words = philox([pairs & _WORD, blocks & _WORD, torch.zeros_like(pairs), blocks >> 32], seed)
    halves = torch.stack(words, -1).view(len(blocks), len(pairs), 2, 1, 2)  # block, pair, half of the rows, -, column
    shifts = torch.arange(0, 32, 8, device=device).view(4, 1)
    in_rows = ((halves >> shifts) & 0xFF).permute(0, 2, 3, 1, 4)  # block, half, row of it, pair, column
    return in_rows.reshape(-1, width)[:rows].to(torch.int32)
