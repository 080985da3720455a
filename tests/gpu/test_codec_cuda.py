"""The codec on a real GPU: the bytes of the CPU, no waiting for the device, and the jobs around it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from codec_tensors import random_tensor, raw, special_tensors
from emulation import needs_compiler
from torch import Tensor, nn

import gact_dist
from gact_dist import codec
from gact_dist.codec import driver, ops, reference
from gact_dist.codec import format as payload_format

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)

DTYPES = payload_format.PACK_DTYPES
ALL_BITS = range(payload_format.MIN_BITS, payload_format.MAX_BITS + 1)
SIZES = (0, 1, 15, 63, 64, 257, 1024, 2048, 4099, 3 * 2048 + 513, 1 << 20)
SEED = -7_123_456_789_012_345_678
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_fallback() -> Iterator[None]:
    """A fall-back to the reference would pass every comparison."""
    ops._warned.discard("cuda")
    yield
    assert "cuda" not in ops._warned


@contextmanager
def without_waiting() -> Iterator[None]:
    """Whatever makes torch wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_same(x: Tensor, bits: int, group_size: int, what: object, columns: int = 1) -> None:
    expected = ops.pack(x, bits, group_size, SEED, columns)
    packed = ops.pack(x.to(DEVICE), bits, group_size, SEED, columns)
    assert torch.equal(packed.cpu(), expected), (what, bits)
    decoded = ops.unpack(packed, bits, group_size, x.numel(), x.dtype, SEED, columns)
    wanted = ops.unpack(expected, bits, group_size, x.numel(), x.dtype, SEED, columns)
    assert torch.equal(raw(decoded.cpu()), raw(wanted)), (what, bits)


# ---- the same bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_bytes_are_those_of_the_cpu(dtype: torch.dtype, group_size: int, bits: int) -> None:
    for numel in SIZES:
        assert_same(random_tensor(numel, dtype), bits, group_size, numel)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_column", [True, False])
def test_a_launch_of_its_own_gives_the_bytes_of_the_operator(dtype: torch.dtype, by_column: bool) -> None:
    """See csrc/hooks/packer.h. The last one is a part of each row, which is read where it is."""
    for x in (random_tensor(4099, dtype), random_tensor(300 * 64, dtype).view(300, 64).t(),
              random_tensor(256 * 192, dtype).view(256, 192)[:, :64]):  # fmt: skip
        x = x.to(DEVICE)
        for bits in ALL_BITS:
            wanted = codec.pack(x, bits, SEED, 128, by_column)
            packer = codec.packer_of(x, bits, 128, by_column)  # whose kernels are loaded now
            assert packer is not None
            with without_waiting():
                packed = packer.packed(x, SEED)
                if packed is None:  # an odd place, or gaps that no kernel reads
                    assert not x.is_contiguous()
                    assert not by_column
                    continue
                decoded = packer.unpacked(packed)
            assert torch.equal(packed.payload, wanted.payload), bits
            assert torch.equal(decoded, codec.unpack_without_gaps(wanted)), bits


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_rare_values_are_those_of_the_cpu(dtype: torch.dtype, group_size: int) -> None:
    for name, x in special_tensors(dtype).items():
        for bits in ALL_BITS:
            assert_same(x, bits, group_size, name)


# Rows of less than a tile, of an odd multiple of 32 elements, of whole tiles; some blocks of rows are short.
SHAPES = ((0, 32), (5, 96), (0, 288), (1, 416), (-3, 768), (7, 4096), (2000, 1600))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_bytes_of_columns_are_those_of_the_cpu(dtype: torch.dtype, group_size: int, bits: int) -> None:
    for more_rows, columns in SHAPES:
        x = random_tensor((2 * group_size + more_rows) * columns, dtype)
        assert_same(x, bits, group_size, columns, columns)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_columns_of_rare_values_are_those_of_the_cpu(dtype: torch.dtype, group_size: int) -> None:
    rows = group_size + 17
    for name, case in special_tensors(dtype).items():
        x = case.repeat(rows * 64 // case.numel() + 1)[: rows * 64]
        for bits in ALL_BITS:
            assert_same(x, bits, group_size, name, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-3, 1e4])
def test_no_operation_is_approximate(dtype: torch.dtype, scale: float) -> None:
    """A division, a product or a subnormal number that is off by one bit shows in some of a million groups."""
    for columns in (1, 1024):
        assert_same(random_tensor(1 << 22, dtype, scale=scale), 4, 64, scale, columns)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.complex64])
def test_every_layout_comes_back_with_its_strides(dtype: torch.dtype) -> None:
    base = random_tensor(8 * 12 * 10 * 14, torch.float32).to(dtype).view(8, 12, 10, 14)
    layouts = [
        base,
        base.to(memory_format=torch.channels_last),
        base.transpose(1, 3),
        base[:, 3:9, ::2, 1:],
        base[:, :1].expand(8, 12, 10, 14),
        base.view(-1)[1:],
        base.view(-1).as_strided((100, 60), (30, 1)),
    ]
    for x in layouts:
        storage = x.untyped_storage().cuda()
        on_gpu = torch.empty(0, dtype=dtype, device=DEVICE).set_(storage, x.storage_offset(), x.shape, x.stride())
        for bits in (None, *ALL_BITS):
            expected, packed = codec.pack(x, bits, seed=SEED), codec.pack(on_gpu, bits, seed=SEED)
            assert torch.equal(packed.payload.cpu(), expected.payload)
            decoded = codec.unpack(packed)
            assert decoded.stride() == codec.unpack(expected).stride()
            assert torch.equal(decoded.cpu(), codec.unpack(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_memory_is_read_and_written(dtype: torch.dtype) -> None:
    x = random_tensor(5001, dtype)[1:]
    expected = ops.pack(x, 3, 128, SEED)
    on_gpu = random_tensor(5001, dtype).to(DEVICE)[1:]
    assert torch.equal(ops.pack(on_gpu, 3, 128, SEED).cpu(), expected)
    out = torch.full((5002,), 7, dtype=dtype, device=DEVICE)
    ops.unpack_out(expected.to(DEVICE), 3, 128, 5000, dtype, SEED, out[1:5001])
    assert torch.equal(out[1:5001].cpu(), ops.unpack(expected, 3, 128, 5000, dtype, SEED))
    assert float(out[0]) == float(out[-1]) == 7


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_read_from_and_written_to_any_element(dtype: torch.dtype) -> None:
    x = random_tensor(300 * 96 + 1, dtype)
    expected = ops.pack(x[1:].clone(), 3, 128, SEED, 96)
    assert torch.equal(ops.pack(x.to(DEVICE)[1:], 3, 128, SEED, 96).cpu(), expected)
    out = torch.full((x.numel() + 1,), 7, dtype=dtype, device=DEVICE)
    ops.unpack_out(expected.to(DEVICE), 3, 128, x.numel() - 1, dtype, SEED, out[1:-1], 96)
    assert torch.equal(out[1:-1].cpu(), ops.unpack(expected, 3, 128, x.numel() - 1, dtype, SEED, 96))
    assert float(out[0]) == float(out[-1]) == 7


@pytest.mark.parametrize("dtype", payload_format.MASK_DTYPES)
def test_masks_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for numel in SIZES:
        x = (random_tensor(numel + 1, torch.float32) > 0).to(dtype)
        for start in (0, 1):
            packed = ops.pack_mask(x.to(DEVICE)[start:])
            assert torch.equal(packed.cpu(), ops.pack_mask(x[start:].clone()))
            assert torch.equal(ops.unpack_mask(packed, x.numel() - start, dtype).cpu(), x[start:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [1024, 1029, 32_000])
def test_sampled_log_probabilities_are_those_of_a_cpu(dtype: torch.dtype, words: int) -> None:
    x = (3 * random_tensor(70 * words, torch.float32).nan_to_num(0.0)).view(70, words).log_softmax(-1).to(dtype)
    x[0, 40:64], x[1, 3], x[1, 100] = -torch.inf, torch.nan, torch.finfo(dtype).min
    found = codec.unpack(codec.pack_log_probabilities(x.to(DEVICE), SEED))
    expected = codec.unpack(codec.pack_log_probabilities(x, SEED))
    # but for groups of the same variance, of which either device may give one a float16 for each word
    assert (raw(found.cpu()) != raw(expected)).float().mean() < 1e-3
    with without_waiting():
        codec.unpack(codec.pack_log_probabilities(x.to(DEVICE), SEED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_rounding_variance_is_that_of_the_cpu(dtype: torch.dtype, group_size: int) -> None:
    for numel in (0, 1, 100, 4099, 1 << 20):
        x = random_tensor(numel, dtype)
        x[: numel // 3] = 0
        weight = torch.rand(numel, generator=torch.Generator().manual_seed(2))
        expected = ops.rounding_variance(x, weight, group_size)
        measured = ops.rounding_variance(x.to(DEVICE), weight.to(DEVICE), group_size)
        # float32 partial sums of at most 32 terms on either side: relative error below 2 * 32 * 2^-24 = 4e-6.
        torch.testing.assert_close(measured.cpu(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", payload_format.GROUP_SIZES)
def test_the_rounding_variance_of_columns_is_that_of_the_cpu(dtype: torch.dtype, group_size: int) -> None:
    for rows, columns in ((group_size, 32), (3 * group_size + 5, 96), (4096, 768)):
        x = random_tensor(rows * columns, dtype)
        x[: x.numel() // 3] = 0
        weight = torch.rand(x.numel(), generator=torch.Generator().manual_seed(2))
        expected = ops.rounding_variance(x, weight, group_size, columns)
        measured = ops.rounding_variance(x.to(DEVICE), weight.to(DEVICE), group_size, columns)
        # float32 sums of as many terms as a group has, none of them negative, each rounded twice; on the CPU a tree.
        torch.testing.assert_close(measured.cpu(), expected, rtol=(group_size + 14) * 2.0**-24, atol=0)


def test_elements_beyond_32_bits_are_numbered_right() -> None:
    numel, bits, group_size = 2**32 + 2048 + 77, 2, 64
    needed_bytes = 3 * numel * 2
    if torch.cuda.mem_get_info(DEVICE)[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes >> 30} GiB of free GPU memory")
    x = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    first = (2**32 - 4096) // group_size
    tail = random_tensor(numel - first * group_size, torch.bfloat16)
    x[first * group_size :] = tail.to(DEVICE)
    buffer = ops.pack(x, bits, group_size, SEED)
    start = first * group_size  # of a tile
    words, scale, offset = reference._split(buffer, payload_format.sections(numel, bits, group_size))
    stored = [words[start * bits // 32 :].cpu(), scale[first:].cpu(), offset[first:].cpu()]
    for part, expected in zip(stored, reference.pack_groups(tail, bits, group_size, SEED, start), strict=True):
        assert torch.equal(raw(part), raw(expected))
    decoded = ops.unpack(buffer, bits, group_size, numel, x.dtype, SEED)[start:]
    wanted = reference.unpack_groups(*stored, bits, group_size, SEED, start, tail.numel(), x.dtype)
    assert torch.equal(decoded.cpu(), wanted)


# ---- beside the job


def test_neither_pack_nor_unpack_waits_for_the_device() -> None:
    x = random_tensor(100_000, torch.bfloat16).to(DEVICE)
    weight = torch.ones(100_000, device=DEVICE)

    def everything() -> None:
        for bits in (1, 4, 8):
            codec.unpack(codec.pack(x, bits, seed=1))
            codec.unpack(codec.pack(x.view(1000, 100)[:, :96].contiguous(), bits, seed=1))  # by column
        codec.unpack(codec.pack(x[::2], 4, seed=1))
        codec.unpack(codec.pack_mask(x > 0))
        codec.unpack(codec.pack_binary((x > 0) * 2.0))
        codec.pack_narrow(torch.arange(5, device=DEVICE))
        ops.rounding_variance(x, weight, 256)
        ops.rounding_variance(x[:96_000], weight[:96_000], 256, 96)

    everything()  # compiles
    with without_waiting():
        everything()


class Block(nn.Module):
    """A convolution, normalisation, relu, dropout, attention and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.attention = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.attention(self.convolution(images).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize("level", ["L1", "L1.2", "L2"])
@pytest.mark.parametrize("autocast", [False, True])
def test_whole_training_steps_do_not_wait_for_the_device(level: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Block().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(16, 3, 16, 16, device=DEVICE), torch.randint(10, (16,), device=DEVICE)
    handle = gact_dist.attach(model, level=level)

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step() -> None:
        with handle.step(loss_fn, (images, labels)):
            loss = loss_fn((images, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # names are met, kernels compiled, the first plan made
        step()
    with without_waiting():
        for _ in range(3):
            step()
    assert handle.report().ratio > 1.5
    handle.detach()


def test_kernels_run_on_the_current_stream_in_its_order() -> None:
    x = random_tensor(1 << 20, torch.float32)
    expected = ops.pack(x, 4, 256, SEED)
    source, late = x.to(DEVICE), torch.zeros(1 << 20, device=DEVICE)
    ops.pack(late, 4, 256, SEED)  # compiles
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # a kernel on any other stream would read the zeros
        late.copy_(source)
        packed = ops.pack(late, 4, 256, SEED)
        decoded = ops.unpack(packed, 4, 256, 1 << 20, torch.float32, SEED)
        late.zero_()
    stream.synchronize()
    assert torch.equal(packed.cpu(), expected)
    assert torch.equal(decoded.cpu(), ops.unpack(expected, 4, 256, 1 << 20, torch.float32, SEED))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device only")
def test_several_devices_in_one_process() -> None:
    x = random_tensor(10_000, torch.bfloat16)
    expected = ops.pack(x, 4, 256, SEED)
    for index in reversed(range(torch.cuda.device_count())):
        packed = ops.pack(x.to(f"cuda:{index}"), 4, 256, SEED)
        assert packed.device.index == index
        assert torch.cuda.current_device() == 0
        assert torch.equal(packed.cpu(), expected)


def test_a_cuda_graph_replays_pack_and_unpack() -> None:
    x = torch.zeros(50_000, dtype=torch.bfloat16, device=DEVICE)
    ops.unpack(ops.pack(x, 4, 256, SEED), 4, 256, x.numel(), x.dtype, SEED)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed = ops.pack(x, 4, 256, SEED)
        decoded = ops.unpack(packed, 4, 256, x.numel(), x.dtype, SEED)
    for seed in (1, 2):
        fresh = random_tensor(x.numel(), x.dtype, seed=seed)
        x.copy_(fresh)
        graph.replay()
        expected = ops.pack(fresh, 4, 256, SEED)
        assert torch.equal(packed.cpu(), expected)
        assert torch.equal(decoded.cpu(), ops.unpack(expected, 4, 256, x.numel(), x.dtype, SEED))


def test_a_module_that_is_not_loaded_during_a_capture_is_a_clear_error() -> None:
    x = torch.zeros(1000, device=DEVICE)
    ops.pack(x, 4, 256, SEED)
    driver._loaded.cache_clear()
    refused = pytest.raises(RuntimeError, match="run one step with the same dtypes and bits before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.pack(x, 4, 256, SEED)
    assert torch.equal(ops.pack(x, 4, 256, SEED).cpu(), ops.pack(x.cpu(), 4, 256, SEED))


def test_what_is_loaded_but_was_never_launched_can_be_captured() -> None:
    x = random_tensor(5000, torch.float32).to(DEVICE)
    driver._loaded.cache_clear()
    packed = ops.pack(x, 5, 64, SEED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoded = ops.unpack(packed, 5, 64, x.numel(), x.dtype, SEED)
    graph.replay()
    assert torch.equal(decoded.cpu(), ops.unpack(packed.cpu(), 5, 64, x.numel(), x.dtype, SEED))


def test_a_new_thread_has_no_context_yet_and_gets_one() -> None:
    x = random_tensor(5000, torch.float32)
    on_gpu, packed = x.to(DEVICE), []
    thread = threading.Thread(target=lambda: packed.append(ops.pack(on_gpu, 4, 64, SEED)))
    thread.start()
    thread.join()
    assert torch.equal(packed[0].cpu(), ops.pack(x, 4, 64, SEED))


def test_tensors_of_two_devices_are_refused() -> None:
    x = random_tensor(256, torch.float32).to(DEVICE)
    packed = ops.pack(x, 4, 64, SEED)
    with pytest.raises(ValueError, match="out is on cpu, expected cuda:0"):
        ops.pack_out(x, 4, 64, SEED, packed.cpu())
    with pytest.raises(ValueError, match="out is on cpu, expected cuda:0"):
        ops.unpack_out(packed, 4, 64, 256, torch.float32, SEED, x.cpu())
    with pytest.raises(ValueError, match="weight is on cpu, expected cuda:0"):
        ops.rounding_variance(x, x.cpu(), 64)


def test_pack_and_unpack_allocate_their_results_only() -> None:
    x = random_tensor(1 << 22, torch.bfloat16).to(DEVICE)
    ops.pack(x, 4, 256, SEED)
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    buffer = ops.pack(x, 4, 256, SEED)
    # torch's allocator rounds up to 512 bytes, large blocks to at most 2 MiB.
    assert torch.cuda.max_memory_allocated() - before_bytes <= buffer.nbytes + (2 << 20)


@pytest.mark.parametrize("name", ["pack", "unpack", "pack_mask", "unpack_mask", "rounding_variance"])
def test_opcheck_accepts_the_operator(name: str) -> None:
    x = random_tensor(700, torch.float32).to(DEVICE)
    arguments = {
        "pack": (x, 3, 64, 1),
        "unpack": (ops.pack(x, 3, 64, 1), 3, 64, 700, torch.float32, 1),
        "pack_mask": (x,),
        "unpack_mask": (ops.pack_mask(x), 700, torch.bool),
        "rounding_variance": (x, torch.ones_like(x), 64),
    }
    torch.library.opcheck(getattr(ops, name), arguments[name])
