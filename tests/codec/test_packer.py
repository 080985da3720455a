"""Packing and unpacking by one call of a kernel (csrc/hooks/packer.h), beside operators and the launches of Python."""

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulation import needs_compiler
from fake_driver import FakeDriver
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gact_dist import codec
from gact_dist.codec import cuda, driver, packed
from gact_dist.codec.driver import DriverError, Kernel

pytestmark = needs_compiler  # with one, classes that were not built are a failure

LAYOUTS = {
    "contiguous": lambda *shape: torch.randn(shape),
    "permuted": lambda *shape: torch.randn(shape).transpose(0, -1),
    "one head of three": lambda *shape: torch.randn(*shape[:-1], 3 * shape[-1])[..., : shape[-1]],
    "every second element": lambda *shape: torch.randn(*shape, 2)[..., 0],
    "rows that are one row": lambda *shape: torch.randn(shape)[:1].expand(shape),
}
SHAPES = (32, 128), (3, 5, 7), (1, 32, 512), (256, 96), (300, 64), (1, 1)


def by_operators(x: Tensor, bits: int, seed: int, by_column: bool = True) -> codec.Packed:
    """``codec.pack`` under a mode that is to see operators."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        return codec.pack(x, bits, seed, 128, by_column)


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_the_bytes_and_the_tensors_of_the_operators(layout: str, dtype: torch.dtype, by_column: bool) -> None:
    for shape in SHAPES:
        x = LAYOUTS[layout](*shape).to(dtype)
        for bits in (1, 3, 4, 8):
            packer, wanted = codec.packer_of(x, bits, 128, by_column), by_operators(x, bits, 77, by_column)
            assert packer is not None
            assert wanted.packer is None
            found = packer.pack(x, 77)
            assert torch.equal(codec.pack(x, bits, 77, 128, by_column).payload, found.payload)
            assert torch.equal(found.payload, wanted.payload)
            assert found.described() == wanted.described()
            same = ("scheme", "bits", "dtype", "shape", "strides", "layout", "group_size", "columns", "seed")
            assert all(getattr(found, name) == getattr(wanted, name) for name in same)
            for unpack in (codec.unpack, codec.unpack_without_gaps):
                assert torch.equal(unpack(found), unpack(wanted))
                assert unpack(found).stride() == unpack(wanted).stride()


@pytest.mark.parametrize("layout", ["one head of three", "every second element"])
def test_what_has_gaps_is_packed_by_a_call_as_well(layout: str) -> None:
    """On a CPU it is copied first."""
    x = LAYOUTS[layout](64, 128).requires_grad_()
    packer = codec.packer_of(x, 4, 128, True)
    assert packer is not None
    found = packer.packed(x, 77)
    assert found.packer is packer
    assert torch.equal(found.payload, by_operators(x.detach(), 4, 77).payload)
    assert not found.payload.requires_grad


def test_what_has_no_gaps_goes_without_operators() -> None:
    calls = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found = packer.pack(x, 1)
    assert found.packer is packer
    with Watch():  # which is to see operators
        assert packer.packed(x, 1) is None
        assert packer.unpacked(found) is None
        watched = packer.pack(x, 1)
        assert torch.equal(codec.unpack(watched), codec.unpack(found))
    assert torch.ops.gact_dist.pack.default in calls
    assert torch.ops.gact_dist.unpack.default in calls
    assert torch.equal(watched.payload, found.payload)


def test_within_a_transform_of_functions_operators_are_called() -> None:
    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found, seen = packer.pack(x, 1), []

    def function(y: Tensor) -> Tensor:
        seen.append((packer.packed(x, 1), packer.unpacked(found), codec.unpack(found)))
        return y.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(2, 3))
    assert [each[:2] for each in seen] == [(None, None)] * 2


def test_what_is_not_as_it_is_expected_goes_the_long_way() -> None:
    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found, waited = packer.pack(x, 1), []
    late = replace(found, ready=lambda: waited.append(True))
    assert packer.unpacked(late) is None
    assert torch.equal(codec.unpack(late), codec.unpack(found))
    assert waited
    without = codec.without_payload(found)
    assert packer.unpacked(without) is None
    assert torch.equal(codec.unpack(codec.with_payload(without, found.payload)), codec.unpack(found))
    with FakeTensorMode() as mode:
        fake = codec.unpack(replace(found, payload=mode.from_tensor(found.payload)))
    assert type(fake) is not Tensor
    assert fake.shape == x.shape


def test_it_owns_no_tensor_and_there_is_one_for_each_form() -> None:
    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    assert codec.packer_of(torch.randn(64, 128), 4, 128, True) is packer
    others = [(x, 3, True), (x, 4, False), (x.half(), 4, True), (x.t(), 4, True), (x[:32], 4, True)]
    assert len({id(codec.packer_of(y, bits, 128, by_column)) for y, bits, by_column in others} - {id(packer)}) == 5
    gone = weakref.ref(x)
    del x, others
    gc.collect()
    assert gone() is None


# -- launches -------------------------------------------------------------------------------------------------------


class Machine:
    """A GPU by a driver that writes down what it is asked; "its" tensors are in host memory."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeDriver(folder)
        self.driver = driver.Driver(self.fake.library)
        self.device, self.capturing, self.launches = 0, False, []
        nvrtc = SimpleNamespace(supported_architectures=lambda: (80, 90), version=lambda: (13, 0))
        monkeypatch.setattr(driver, "find_nvrtc", lambda: nvrtc)
        monkeypatch.setattr(driver, "compile_kernels", lambda *_: b"code")
        for module in (driver, cuda):
            monkeypatch.setattr(module, "find_driver", lambda: self.driver)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(packed, "current_device", lambda: self.device)
        monkeypatch.setattr(packed, "current_raw_stream", lambda index: 70 + index)
        monkeypatch.setattr(
            packed.ops, "plain_calls", lambda _, *form: cuda.plain_calls(torch.device("cuda", 0), *form)
        )
        monkeypatch.setattr(packed, "_packers", {})
        monkeypatch.setattr(cuda, "launch", lambda _, kernel, *numbers: self.launches.append((kernel, numbers)))

    def launched(self) -> list[str]:
        """The launches that the driver was asked for since the last time."""
        return [call for call in self.fake.calls() if call.startswith("launch")]

    def wanted(self, action: str, elements: Tensor, buffer: Tensor, *form: int) -> tuple[str, int]:
        """(what Python's launch is, as the driver writes it, its number of arguments)."""
        cuda._launch_codec(action, elements, buffer, *form)
        (kernel, (blocks, threads, *arguments)) = self.launches.pop()
        assert isinstance(kernel, Kernel)
        assert kernel.name == action
        numbers = " ".join(map(str, arguments))
        return f"launch {action} {blocks},1,1 {threads},1,1 shared 0 stream 70 arguments {numbers} ", len(arguments)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    yield Machine(tmp_path, monkeypatch)
    driver._loaded.cache_clear()


@pytest.mark.parametrize("layout", ["contiguous", "permuted", "one head of three"])
def test_a_launch_has_the_arguments_that_python_gives_it(machine: Machine, layout: str) -> None:
    for shape, dtype in (((256, 96), torch.bfloat16), ((3, 5, 70), torch.float32), ((300, 64), torch.float16)):
        x = LAYOUTS[layout](*shape).to(dtype)
        for bits, by_column in ((4, True), (2, False)):
            packer = codec.packer_of(x, bits, 128, by_column)
            form = packer._form
            flat = x.as_strided((x.numel(),), (1,))
            if form.layout.fill is packed.Fill.SCATTERED:
                flat = x.as_strided((x.numel() // form.columns, form.columns), (form.pitch, 1)) if form.pitch else None
            about = bits, 128, -5, form.columns
            if flat is None:
                assert packer.packed(x, -5) is None
                continue
            machine.fake.show(8)
            found = packer.packed(x, -5)
            text, count = machine.wanted("pack", flat, found.payload, *about)
            assert (machine.launched(), count) == ([text], 8)
            machine.fake.show(7)
            made = packer.unpacked(found)
            text, count = machine.wanted("unpack", made.as_strided((x.numel(),), (1,)), found.payload, *about)
            assert (machine.launched(), count) == ([text], 7)


def test_another_device_or_memory_that_begins_elsewhere_goes_the_long_way(machine: Machine) -> None:
    memory = torch.randn(64 * 128 + 1)
    x = memory[: 64 * 128].view(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found = packer.packed(x, 1)
    assert packer.packed(memory[1:].view(64, 128), 1) is None
    machine.device = 1
    assert packer.packed(x, 1) is None
    assert packer.unpacked(found) is None
    assert len(machine.launched()) == 1


def test_nothing_is_loaded_for_it_during_a_capture(machine: Machine) -> None:
    machine.capturing = True
    packer = codec.packer_of(torch.randn(64, 128), 4, 128, True)
    assert packer.packed(torch.randn(64, 128), 1) is None
    assert machine.fake.calls() == []


def test_a_new_thread_enters_the_context_of_its_device(machine: Machine) -> None:
    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found = packer.packed(x, 1)
    machine.fake.calls()
    thread = threading.Thread(target=packer.unpacked, args=(found,))
    thread.start()
    thread.join()
    context, launch = machine.fake.calls()
    assert context == "context 100"
    assert launch.startswith("launch unpack ")


def test_a_refused_launch_is_an_error(machine: Machine) -> None:
    x = torch.randn(64, 128)
    packer = codec.packer_of(x, 4, 128, True)
    found = packer.packed(x, 1)
    packer.blocks = 0
    for call, argument in ((packer.unpacked, (found,)), (packer.packed, (x, 1))):
        with pytest.raises(DriverError, match=r"the driver refused cuLaunchKernel: unknown error \(1\)"):
            call(*argument)
