"""Functions of what is decoded, while it is decoded: GELU, its gradient, products with masks."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gact_dist import codec
from gact_dist.codec import ops
from gact_dist.codec.format import FUNCTION_DTYPES, FUNCTIONS, PART_ELEMENTS

SHAPES = [(1024, 192), (300, 96), (257, 1088), (3, 7, 5), (1000,), (3 * PART_ELEMENTS + 5,)]
TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 1.14 * 2**-8}  # of the kernels; half a unit of what is at most 1.13
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.fixture(params=[*ops.available_isas(), None])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str | None]:
    """Run a test with each native implementation, and with the operators' definitions."""
    before = ops.isa()
    if request.param is None:
        for name in ("unpack_through", "unpack_gradient", "mask_product"):
            monkeypatch.setattr(ops, name, getattr(ops, f"_{name}"))
    else:
        ops.set_isa(request.param)
    yield request.param
    if before in ops.available_isas():
        ops.set_isa(before)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, gradient)"""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(shape, generator=generator)
    return x.to(dtype), torch.randn(shape, generator=generator).to(dtype)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    """But for those of NaN, of which there are many."""
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), ~numbers)
    kind = INTEGERS[wanted.dtype]
    assert torch.equal(found[numbers].view(kind), wanted[numbers].view(kind))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", FUNCTION_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_of_what_is_decoded_and_its_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, function: str, isa: str | None
) -> None:
    x, grad = operands(shape, dtype)
    tolerance = TOLERANCE[dtype] if isa is not None else 4 * TOLERANCE[dtype]  # torch's tanh
    for bits in (2, 5, 8):
        packed = codec.pack(x, bits, seed=bits)
        decoded = codec.unpack(packed).double()
        made = codec.function_part(packed, function, 0, x.numel()).view(shape)
        error = (made.double() - F.gelu(decoded, approximate=function)).abs()
        assert bool((error <= tolerance * decoded.abs()).all())
        of_x = codec.gelu_gradient(packed, function, grad)
        wanted = torch.ops.aten.gelu_backward(grad.double(), decoded, approximate=function)
        assert bool(((of_x.double() - wanted).abs() <= tolerance * grad.double().abs()).all())
        assert (made.dtype, of_x.dtype, of_x.stride()) == (dtype, dtype, x.stride())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_instruction_sets_give_the_same_bits(function: str) -> None:
    x, grad = operands((512, 96), torch.float32)
    packed, found = codec.pack(x, 5, seed=1), []
    before = ops.isa()
    for name in ops.available_isas():
        ops.set_isa(name)
        found.append((codec.function_part(packed, function, 0, x.numel()), codec.gelu_gradient(packed, function, grad)))
    if found:
        ops.set_isa(before)
    for made, of_x in found:
        assert torch.equal(made, found[0][0])
        assert torch.equal(of_x, found[0][1])


@pytest.mark.parametrize("by_column", [True, False])
def test_parts_are_those_of_the_whole(by_column: bool, isa: str | None) -> None:
    x, _ = operands((5 * PART_ELEMENTS // 64, 64), torch.float32)
    packed = codec.pack(x, 4, seed=1, by_column=by_column)
    whole, unit = codec.function_part(packed, "none", 0, x.numel()), codec.part_unit(packed)
    memory = torch.empty(2 * unit)
    for first in range(0, x.numel() - 2 * unit + 1, unit):
        part = codec.function_part(packed, "none", first, first + 2 * unit, memory)
        assert part is memory
        assert torch.equal(part, whole[first : first + 2 * unit])


def test_beyond_the_bounds_of_the_polynomials(isa: str | None) -> None:
    """Codes of both ends of a wide range: there GELU is x or zero, and its slope one or zero."""
    x = torch.tensor([-1e4, 1e4]).repeat(64)
    packed, grad = codec.pack(x, 8, seed=1), torch.full((128,), 3.0)
    decoded = codec.unpack(packed)
    assert torch.equal(codec.function_part(packed, "none", 0, 128), F.gelu(decoded))
    assert torch.equal(codec.gelu_gradient(packed, "none", grad), torch.tensor([0.0, 3.0]).repeat(64))


@pytest.mark.parametrize("dtype", FUNCTION_DTYPES)
@pytest.mark.parametrize("shape", [(40, 96), (5, 7, 11), (63,), (4097,)])
def test_products_with_masks_are_torchs_bit_for_bit(
    shape: tuple[int, ...], dtype: torch.dtype, isa: str | None
) -> None:
    _, grad = operands(shape, dtype)
    grad.view(-1)[:6] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -1e-40])
    used = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    noise = used.to(dtype) / 0.6
    packed = codec.pack_binary(noise)
    assert codec.has_products(packed) is (ops.isa() != "reference")
    assert_same_bits(codec.mask_product(packed, grad), grad * noise)
    mask = codec.pack_mask(used.to(dtype))
    wanted = torch.ops.aten.threshold_backward(grad, used.to(dtype), 0)
    assert_same_bits(codec.mask_product(mask, grad, selects=True), wanted)


def test_what_no_kernel_takes() -> None:
    x = torch.randn(64, 96)
    assert not codec.has_functions(codec.pack(x.half(), 4))
    assert not codec.has_functions(codec.pack(x, None))
    assert not codec.has_functions(codec.pack(x[:, :32], 4))
    assert not codec.has_functions(codec.pack_within(x, 4, (-1.0, 1.0), 0))
    assert not codec.has_products(codec.pack(x, 4))
    assert not codec.has_products(codec.pack_mask(x > 0))


def test_wrong_arguments_raise(isa: str | None) -> None:
    x = torch.randn(512)
    packed, half = codec.pack(x, 4), codec.pack(x.half(), 4)
    form = (4, 128, 512, torch.float32, 0)
    wrong = [
        lambda: ops.unpack_through(half.payload, 4, 128, 512, torch.float16, 0, torch.empty(512).half(), 1, 0, 0),
        lambda: ops.unpack_through(packed.payload, *form, torch.empty(512), 1, 0, 2),
        lambda: ops.unpack_through(packed.payload, *form, torch.empty(100), 1, 0, 0),
        lambda: ops.unpack_gradient(packed.payload, *form, torch.empty(511), 1, 0),
        lambda: ops.unpack_gradient(packed.payload, *form, torch.empty(512).half(), 1, 0),
        lambda: ops.mask_product(codec.pack_mask(x > 0).payload, x.double(), torch.ones(()).double(), False),
    ]
    for call in wrong:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=r"expected|for float32"):
            call()
