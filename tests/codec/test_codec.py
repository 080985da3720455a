"""codec.pack and codec.unpack: every shape, stride and dtype that autograd saves."""

import gc
import weakref
from math import prod

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gact_dist import codec
from gact_dist.codec import format as payload_format
from gact_dist.codec import reference as ops_reference


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def strided_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    line = random_tensor(4000) > 0 if dtype == torch.bool else random_tensor(4000, dtype=dtype)
    image = line[:1440].view(2, 6, 10, 12)
    return {
        "scalar": line[7],
        "vector": line[:300],
        "offset": line[5:300],
        "five dimensions": line[:1440].view(2, 3, 4, 5, 12),
        "no elements": line[:0].view(0, 3),
        "no elements, sliced": image[:, :, :0, ::2],
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": line[:600].view(20, 30).t(),
        "permuted": image.permute(2, 0, 3, 1),
        "size 1 with an odd stride": line.as_strided((1, 30), (77, 1)),
        "columns of a matrix": line[:600].view(20, 30)[:, 4:11],
        "every third": line[::3],
        "transposed slice": image[:, 1:3, :, ::2].transpose(1, 3),
        "expanded": line[:12].view(12, 1).expand(12, 50),
        "expanded scalar": line[3].expand(4, 5),
        "expanded slice": line[:600].view(20, 30)[:, None, ::2].expand(20, 7, 15),
        "windows": line.as_strided((50, 5), (1, 1)),
        "overlapping windows": line.as_strided((10, 8), (3, 1)),
        "overlap with gaps": line.as_strided((10, 8), (4, 2)),
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16])
@pytest.mark.parametrize("name", strided_tensors())
def test_shape_strides_and_dtype_come_back_and_values_nearly(name: str, dtype: torch.dtype) -> None:
    x = strided_tensors(dtype)[name]
    decoded = codec.unpack(codec.pack(x, bits=8))
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, x.stride(), x.dtype)
    if x.numel():
        # One step of at most (range of 4000 normal numbers < 8) / 255, the step rounded up by at most 2^-7, and half
        # an ulp of a value below 4 in bfloat16 (2^-7); a complex number has two parts.
        assert float((decoded - x).abs().max()) <= 2**0.5 * (8 / 255 * (1 + 2**-7) + 2**-7)


@pytest.mark.parametrize("name", strided_tensors())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int16, torch.complex128, torch.bool])
def test_exact_copies_are_bitwise_and_private(name: str, dtype: torch.dtype) -> None:
    x = strided_tensors(dtype)[name]
    packed = codec.pack(x, bits=None)
    decoded = codec.unpack(packed)
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, x.stride(), x.dtype)
    assert same_bits(decoded, x)
    assert packed.bits is None
    storages = {t.untyped_storage().data_ptr() for t in (x, packed.payload, decoded) if t.numel()}
    assert len(storages) == (3 if x.numel() else 0)


def test_exact_copies_keep_the_bits_of_a_nan() -> None:
    x = torch.tensor([0x7FC12345, -0x3EDCC, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert torch.equal(codec.unpack(codec.pack(x, bits=None)).view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize("name", strided_tensors())
def test_bool_masks_take_one_bit_and_are_exact(name: str) -> None:
    mask = strided_tensors(torch.bool)[name]
    packed = codec.pack(mask, bits=1)
    assert torch.equal(codec.unpack(packed), mask)
    assert codec.unpack(packed).stride() == mask.stride()
    if name == "five dimensions":
        assert packed.nbytes == 1440 // 8


@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_masks_of_any_dtype_come_back_as_zeros_and_ones(dtype: torch.dtype) -> None:
    mask = (random_tensor(7, 11, 13) > 0).to(dtype).transpose(0, 2)
    decoded = codec.unpack(codec.pack_mask(mask))
    assert decoded.dtype == dtype
    assert decoded.stride() == mask.stride()
    assert torch.equal(decoded, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("constant", [1 / 0.9, -2.5, 0.0])
def test_dropout_noise_takes_one_bit_and_is_exact(dtype: torch.dtype, constant: float) -> None:
    noise = torch.where(random_tensor(40, 50) > 0, constant, 0.0).to(dtype)
    for x in (noise, noise.t(), noise[:, ::3], noise[:0], torch.full_like(noise, constant)):
        packed = codec.pack_binary(x)
        decoded = codec.unpack(packed)
        assert torch.equal(decoded, x)
        assert decoded.stride() == x.stride()
    assert codec.pack_binary(noise).nbytes == 2000 // 8 + dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazily_conjugated_tensors_come_back(dtype: torch.dtype) -> None:
    x = torch.complex(random_tensor(30, 20), random_tensor(30, 20) + 1).to(dtype).t().conj()
    for bits in (8, None):
        decoded = codec.unpack(codec.pack(x, bits=bits))
        assert decoded.is_conj()
        assert decoded.stride() == x.stride()
        assert float((decoded - x).abs().max()) < (0.1 if bits else 1e-30)


LAZILY_NEGATED = {
    "transposed": lambda x: x.t(),
    "broadcast": lambda x: x[:1].expand(30, 20),
    "overlapping": lambda x: x.as_strided((30, 20), (2, 2)),
    "gaps": lambda x: x[::2, ::3],
    "overlapping between gaps": lambda x: x.as_strided((4, 4), (6, 4)),
    "none": lambda x: x[:0],
}


@pytest.mark.parametrize("layout", LAZILY_NEGATED)
def test_lazily_negated_tensors_come_back_with_their_strides(layout: str) -> None:
    x = LAZILY_NEGATED[layout](torch.complex(random_tensor(30, 20), random_tensor(30, 20) + 1).conj().imag)
    assert x.is_neg()
    exact = codec.unpack(codec.pack(x, bits=None))
    assert exact.is_neg()
    rounded, binary = codec.unpack(codec.pack(x, bits=8)), codec.unpack(codec.pack_binary(x * 0 - 2))
    assert codec.stored_bytes(x) == codec.borrow(x).payload.nbytes
    assert codec.stored_values(x).numel() * 4 == codec.stored_bytes(x)
    for decoded in (exact, rounded):
        assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(exact, x)
    assert torch.equal(binary, x * 0 - 2)
    assert torch.allclose(rounded, x, rtol=0, atol=8 / 255)  # a group's range is below 8 standard deviations


def test_a_lazily_negated_tensor_without_arithmetic_comes_back() -> None:
    x = torch._neg_view(random_tensor(30, 20).to(torch.float8_e4m3fn))
    decoded = codec.unpack(codec.pack(x, bits=None))
    assert decoded.is_neg()
    assert torch.equal(torch._neg_view(decoded).view(torch.uint8), torch._neg_view(x).view(torch.uint8))


def test_gaps_are_neither_read_nor_stored() -> None:
    base = torch.full((64, 64), torch.nan)
    base[:, :8] = random_tensor(64, 8)
    x = base[:, :8]
    packed = codec.pack(x, bits=8)
    assert bool(torch.isfinite(codec.unpack(packed)).all())
    assert packed.nbytes == payload_format.sections(512, 8, codec.DEFAULT_GROUP_SIZE).total_bytes


@pytest.mark.parametrize("bits", [3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_what_has_gaps_can_be_decoded_without_them(dtype: torch.dtype, bits: int | None) -> None:
    """Queries, keys and values in one tensor: each takes a third, its dimensions in the order that they have there."""
    queries, keys, _ = torch.randn(2, 16, 3, 4, 8).to(dtype).permute(2, 0, 3, 1, 4)
    for tensor in (queries, keys[:, :1], keys[:, :1].expand(-1, 4, -1, -1)):
        packed = codec.pack(tensor, bits, seed=1)
        found = codec.unpack_without_gaps(packed)
        assert torch.equal(found, codec.unpack(packed))
        elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        assert found.untyped_storage().nbytes() == elements * dtype.itemsize
        order = sorted(range(4), key=tensor.stride, reverse=True)
        assert sorted(range(4), key=found.stride, reverse=True) == order
    dense = codec.pack(torch.randn(4, 6).t(), bits)
    assert codec.unpack_without_gaps(dense).stride() == (1, 6)


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", strided_tensors())
def test_elements_stay_on_their_side_of_limits(name: str, dtype: torch.dtype, bits: int) -> None:
    x, limits = strided_tensors(dtype)[name], (-0.75, 1.0)
    packed = codec.pack_within(x, bits, limits)
    decoded = codec.unpack(packed)
    assert (decoded.shape, decoded.stride(), decoded.dtype) == (x.shape, x.stride(), x.dtype)
    if packed.scheme is codec.Scheme.QUANTISED:  # nothing is rounded where elements overlap with gaps between them
        assert packed.nbytes <= codec.pack(x, bits).nbytes + packed.layout.stored_numel / 4 + 4
        assert packed.nbytes == packed.nbytes_at(bits)
        assert torch.equal(decoded < limits[0], x <= limits[0])
        assert torch.equal(decoded > limits[1], x >= limits[1])
        plain = codec.unpack(codec.pack(x, bits)).double()
        assert bool(((decoded - x).double().abs() <= (plain - x).abs() + 2**-6).all())
    else:
        assert torch.equal(decoded, x)


def test_an_expanded_tensor_stores_its_base_only() -> None:
    x = random_tensor(512, 1).expand(512, 1000)
    assert codec.pack(x, bits=4).nbytes == payload_format.sections(512, 4, codec.DEFAULT_GROUP_SIZE).total_bytes
    assert codec.pack(x, bits=None).nbytes == 512 * 4


def test_columns_are_the_channels_where_the_shape_tells_of_any() -> None:
    tokens, image = random_tensor(8, 64, 96), random_tensor(8, 64, 12, 12)
    heads = tokens.view(8, 64, 3, 32).transpose(1, 2)
    expected = [
        (tokens, 96),
        (tokens.view(512, 96), 96),
        (tokens.view(512, 96).t(), 96),
        (tokens.transpose(0, 1), 96),
        (tokens[:, 1:, :64], 64),  # gathered before it is packed
        (heads, 96),  # side by side in memory
        (heads.transpose(2, 3), 96),
        (image.to(memory_format=torch.channels_last), 64),
        (image, 1),
        (heads.contiguous(), 1),  # nothing tells it from images
        (tokens[:1, :60], 1),  # less than a group of rows
        (tokens.view(1024, 48), 1),  # not a multiple of 32
        (tokens.reshape(-1), 1),
        (tokens[:, :, :1].expand(8, 64, 96), 1),
        (torch.complex(tokens, tokens), 192),
    ]
    for tensor, columns in expected:
        assert codec.columns_of(tensor, 64) == columns, (tensor.shape, tensor.stride())
        packed = codec.pack(tensor, bits=8, group_size=64)
        assert packed.columns == columns
        decoded = codec.unpack(packed)
        assert decoded.stride() == tensor.stride()
        assert float((decoded - tensor).abs().max()) <= 2**0.5 * 10 / 255 * (1 + 2**-6)
        assert torch.equal(
            codec.from_tensors(*codec.to_tensors(packed), tensor.dtype, tensor.shape, tensor.stride()), decoded
        )


def test_a_channel_of_its_own_scale_is_rounded_by_its_own_scale() -> None:
    x = random_tensor(4, 128, 64) * torch.logspace(-4, 4, 64)
    errors = (codec.unpack(codec.pack(x, bits=8, group_size=128)) - x).abs().amax((0, 1))
    assert bool((errors <= x.abs().amax((0, 1)) * 2 / 255 * (1 + 2**-6)).all())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nbytes_is_bits_and_one_scale_and_offset_for_each_group(bits: int, dtype: torch.dtype) -> None:
    x = random_tensor(64, 1024, dtype=dtype)
    groups = x.numel() // codec.DEFAULT_GROUP_SIZE
    assert codec.pack(x, bits=bits).nbytes == x.numel() * bits // 8 + groups * (2 + 2)


def test_float64_goes_through_float32() -> None:
    x = random_tensor(1000, dtype=torch.float64) / 3
    decoded = codec.unpack(codec.pack(x, bits=6, seed=4))
    assert torch.equal(decoded, codec.unpack(codec.pack(x.float(), bits=6, seed=4)).double())


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    x = random_tensor(1000)
    before = torch.get_rng_state()
    first = codec.pack(x, bits=2, seed=3).payload
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(codec.pack(x, bits=2, seed=3).payload, first)


def test_seeds_select_the_noise_over_the_whole_64_bit_range() -> None:
    x = random_tensor(1000)
    payloads = {bytes(codec.pack(x, 2, seed).payload.numpy()) for seed in (0, 1, -1, 2**62, -(2**63), 2**63 - 1)}
    assert len(payloads) == 6


class _NoHostReads(TorchDispatchMode):
    """Fails on the operators that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} waits for the device")
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None:
            raise AssertionError("moves a tensor between devices")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", strided_tensors())
def test_nothing_waits_for_the_device(name: str) -> None:
    x = strided_tensors()[name]
    with _NoHostReads():
        for packed in (codec.pack(x, 3), codec.pack(x, None), codec.pack_mask(x), codec.pack_within(x, 3, (-1.0, 1.0))):
            codec.unpack(packed)
    # pack_binary() reads what a CPU holds. A fake tensor, which holds nothing, goes an accelerator's way.
    with FakeTensorMode(), _NoHostReads():
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        for packed in (codec.pack(y, 3), codec.pack(y, None), codec.pack_mask(y), codec.pack_binary(y)):
            codec.unpack(packed)


def test_integers_keep_their_type_and_booleans_take_one_bit_where_the_host_would_wait() -> None:
    """A fake tensor goes an accelerator's way."""
    assert codec.pack_narrow(torch.arange(200)).bits == 8
    with FakeTensorMode(), _NoHostReads():
        assert codec.pack_narrow(torch.arange(200)) is None
        assert codec.pack_mask(torch.empty(200, dtype=torch.bool)).nbytes <= 28  # in whole words


def test_the_reference_does_not_wait_for_the_device_either() -> None:
    x = random_tensor(1000)
    x[5] = torch.inf
    with _NoHostReads():
        buffer = ops_reference.pack(x, 3, 64, 0)
        ops_reference.unpack(buffer, 3, 64, 1000, torch.float32, 0)
        ops_reference.rounding_variance(x, x, 64)
        ops_reference.unpack_mask(ops_reference.pack_mask(x), 1000, torch.bool)


def test_modes_of_torch_change_nothing() -> None:
    x = random_tensor(50, 60).requires_grad_()
    expected = codec.unpack(codec.pack(x.detach(), 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(codec.unpack(codec.pack(x, 4)), expected)
    with torch.no_grad():
        assert torch.equal(codec.unpack(codec.pack(x, 4)), expected)
    with torch.inference_mode():
        assert torch.equal(codec.unpack(codec.pack(x, 4)), expected)
    packed = codec.pack(x * 2, 4)
    assert not packed.payload.requires_grad
    assert not codec.unpack(packed).requires_grad
    assert x.grad is None


@pytest.mark.parametrize("bits", [4, None])
def test_packed_keeps_nothing_of_the_tensor_alive(bits: int | None) -> None:
    x = random_tensor(1000)
    storage = weakref.ref(x.untyped_storage())
    packed = codec.pack(x, bits)
    first = codec.unpack(packed)
    del x
    gc.collect()
    assert storage() is None
    first.zero_()
    assert float(codec.unpack(packed).abs().max()) > 0


def test_fake_tensors_of_more_than_32_bits_of_elements() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 2**32, 1, dtype=torch.bfloat16).transpose(0, 1)
        packed = codec.pack(x, 2)
        decoded = codec.unpack(packed)
        assert (decoded.shape, decoded.stride()) == (x.shape, x.stride())
        assert packed.nbytes == payload_format.sections(3 * 2**32, 2, codec.DEFAULT_GROUP_SIZE).total_bytes


def test_user_mistakes_say_what_to_do() -> None:
    x = random_tensor(10)
    for bits in (0, 9, 2.5, "4"):
        with pytest.raises(ValueError, match="expected an integer 1 to 8, or None"):
            codec.pack(x, bits)
    with pytest.raises(ValueError, match="group_size is 100"):
        codec.pack(x, 4, group_size=100)
    with pytest.raises(ValueError, match="seed is"):
        codec.pack(x, 4, seed=2**63)
    for dtype in (torch.int64, torch.float8_e5m2):
        with pytest.raises(TypeError, match="use bits=None"):
            codec.pack(torch.ones(10).to(dtype), 4)
    with pytest.raises(TypeError, match="bits=None"):
        codec.pack(x > 0, 4)
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        codec.pack([1.0], 4)
    with pytest.raises(TypeError, match="expected a strided one"):
        codec.pack(x.to_sparse(), 4)
    with pytest.raises(TypeError, match="meta"):
        codec.pack(x.to("meta"), 4)
    with pytest.raises(TypeError, match="quantised"):
        codec.pack(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), None)
    with pytest.raises(TypeError, match="mask"):
        codec.pack_mask(x.long())
    with pytest.raises(TypeError, match="pack_mask for bool"):
        codec.pack_binary(x > 0)
