"""Results of norms made again from their statistics, on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation import needs_compiler
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gact_dist import codec
from gact_dist.codec import ops

ROWS, COLUMNS = 37, 75


def defined(x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """In float32, one rounding for each operation, and one to the type of x."""
    made = x.float().reshape(len(rstd), -1)
    made = made * rstd[:, None] if mean is None else (made - mean[:, None]) * rstd[:, None]
    made = made if weight is None else made * weight.float()
    made = made if bias is None else made + bias.float()
    return made.to(x.dtype).view(x.shape)


def operands(dtype: torch.dtype, columns: int = COLUMNS) -> list[Tensor]:
    """x, mean, rstd, weight, bias."""
    torch.manual_seed(columns)
    x, statistics, vectors = torch.randn(ROWS, columns), torch.rand(2, ROWS) + 0.5, torch.randn(2, columns)
    return [x.to(dtype), *statistics, *vectors.to(dtype)]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 16, COLUMNS, 40_000])
@pytest.mark.parametrize("has", [(1, 1, 1), (0, 1, 0), (1, 0, 1), (1, 0, 0)], ids=str)
def test_each_instruction_set_gives_the_definition(dtype: torch.dtype, columns: int, has: tuple[int, ...]) -> None:
    x, mean, rstd, weight, bias = operands(dtype, columns)
    given = mean if has[0] else None, rstd, weight if has[1] else None, bias if has[2] else None
    expected, before = defined(x, *given), ops.isa()
    try:
        for isa in ops.available_isas():
            ops.set_isa(isa)
            beside = codec.normalised(x, *given, in_place=False)
            over = x.clone()
            assert codec.normalised(over, *given, in_place=True) is over
            assert torch.equal(beside, expected), isa
            assert torch.equal(over, expected), isa
    finally:
        ops.set_isa(before)


class _Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        return func(*args, **(kwargs or {}))


REFUSED = {
    "float16": lambda x, m, r, w, b: (x.half(), m, r, w.half(), b.half()),
    "float64": lambda x, m, r, w, b: (x.double(), m, r, w.double(), b.double()),
    "a transpose": lambda x, m, r, w, b: (x.t().contiguous().t(), m, r, w, b),
    "statistics in bfloat16": lambda x, m, r, w, b: (x, m.bfloat16(), r.bfloat16(), w, b),
    "a weight of another type": lambda x, m, r, w, b: (x, m, r, w.bfloat16(), b),
    "a weight of each element": lambda x, m, r, w, b: (x, m, r, w.expand(ROWS, -1), b),
    "a bias with gaps": lambda x, m, r, w, b: (x, m, r, w, b.repeat_interleave(2)[::2]),
    "rows of other lengths": lambda x, m, r, w, b: (x, m[1:], r[1:], w, b),
    "nothing": lambda x, m, r, w, b: (x[:0], m[:0], r[:0], w, b),
    "a graph": lambda x, m, r, w, b: (x.requires_grad_(), m, r, w, b),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_serves_is_left_to_others(name: str) -> None:
    given = REFUSED[name](*operands(torch.float32))
    assert codec.normalised(*given, in_place=False) is None


def test_nothing_is_hidden_from_modes_and_transforms() -> None:
    given = operands(torch.float32)
    with _Sees():
        assert codec.normalised(*given, in_place=False) is None
    found = []
    torch.func.vmap(lambda x: (found.append(codec.normalised(*given, in_place=False)), x)[1])(torch.zeros(2))
    assert found == [None]
