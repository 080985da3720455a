"""Modules and launches by a driver library that writes down what it is asked: no GPU is needed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from emulation import needs_compiler
from fake_driver import FakeDriver

from gact_dist.codec import driver, nvrtc
from gact_dist.codec.driver import Kernel

pytestmark = needs_compiler

KERNEL = Kernel("masks.cu", "pack_mask_1")
MASKS = [f"function {name}" for name in driver.KERNELS["masks.cu"]]


class Machine:
    """What the kernels can see of a machine with GPUs. Number 0 is the current one; their streams are 70, 71, ..."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeDriver(folder)
        self.compilations: list[tuple[str, ...]] = []
        self.current = [0]
        self.capturing = False
        self.emptied = 0
        self.refusal = ""

    def compile(self, _: object, file: str, definitions: tuple[str, ...], target: str) -> bytes:
        self.compilations.append((file, *definitions, target))
        if self.refusal:
            raise nvrtc.KernelsUnavailableError(self.refusal)
        return b"code"

    def empty_cache(self) -> None:
        self.emptied += 1

    @contextmanager
    def device(self, entered: torch.device) -> Iterator[None]:
        self.current.append(entered.index)
        yield
        self.current.pop()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    found = SimpleNamespace(supported_architectures=lambda: (80, 90), version=lambda: (13, 0))
    monkeypatch.setattr(driver, "find_nvrtc", lambda: found)
    monkeypatch.setattr(driver, "find_driver", lambda: loaded)
    monkeypatch.setattr(driver, "compile_kernels", machine.compile)
    monkeypatch.setattr(torch.cuda, "device", machine.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current[-1])
    monkeypatch.setattr(driver, "current_raw_stream", lambda index: 70 + index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "empty_cache", machine.empty_cache)
    loaded = driver.Driver(machine.fake.library)
    loaded._library.cuCtxSetCurrent(None)
    machine.fake.calls()
    yield machine
    driver._loaded.cache_clear()
    driver._waiting.clear()


def launch(kernel: Kernel = KERNEL, index: int = 0) -> None:
    driver.launch(torch.device("cuda", index), kernel, 5, 96, 2**40, -7)


def launched(name: str = "pack_mask_1", index: int = 0) -> str:
    return f"launch {name} 5,1,1 96,1,1 shared 0 stream {70 + index} arguments {2**40} -7 "


def test_a_module_is_loaded_once_on_each_device_with_all_its_functions(machine: Machine) -> None:
    launch()
    assert machine.fake.calls() == ["context 100", "load code", *MASKS, launched()]
    launch()
    launch(Kernel("masks.cu", "unpack_mask_8"))
    assert machine.fake.calls() == [launched(), launched("unpack_mask_8")]
    launch(index=1)
    assert machine.fake.calls() == ["load code", *MASKS, launched(index=1)]
    assert machine.compilations == [("masks.cu", "sm_90")] * 2


def test_each_width_is_a_module_of_its_own(machine: Machine) -> None:
    for bits in (4, 3, 4):
        launch(Kernel("codec.cu", "pack", ("GACT_ELEMENT=float", f"GACT_BITS={bits}")))
    wanted = [("codec.cu", "GACT_ELEMENT=float", f"GACT_BITS={bits}", "sm_90") for bits in (4, 3)]
    assert machine.compilations == wanted
    assert machine.fake.calls().count(launched("pack")) == 3


def test_a_new_thread_enters_the_context_of_its_device(machine: Machine) -> None:
    """torch does not call the driver in a thread whose device is the default one."""
    launch()
    machine.fake.calls()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert machine.fake.calls() == ["context 100", launched()]


def test_nothing_is_loaded_during_a_capture_and_what_is_loaded_can_be_captured(machine: Machine) -> None:
    machine.capturing = True
    with pytest.raises(RuntimeError, match="run one step with the same dtypes and bits before the capture"):
        launch()
    assert machine.fake.calls() == []
    machine.capturing = False
    launch()
    machine.fake.calls()
    machine.capturing = True
    launch(Kernel("masks.cu", "unpack_mask_4"))  # never launched before: its function is known all the same
    assert machine.fake.calls() == [launched("unpack_mask_4")]
    with pytest.raises(RuntimeError, match="not loaded yet"):  # another width
        launch(Kernel("codec.cu", "pack", ("GACT_BITS=5",)))


def test_out_of_memory_empties_the_cache_and_tries_once_more(machine: Machine) -> None:
    machine.fake.fail_loads(2)
    launch()
    assert machine.emptied == 1
    assert machine.fake.calls() == ["context 100", "load fails", "load code", *MASKS, launched()]


def test_out_of_memory_twice_is_an_error_that_is_not_remembered(machine: Machine) -> None:
    machine.fake.fail_loads(2, 2)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"kernels of masks\.cu on GPU 0: .*CUDA_ERROR_OUT_OF_MEMORY \(2\)"
    ):
        launch()
    assert machine.emptied == 1
    launch()
    assert machine.fake.calls()[-1] == launched()


def test_an_image_that_the_driver_cannot_use_is_remembered(machine: Machine) -> None:
    machine.fake.fail_loads(222)
    for _ in range(3):
        with pytest.raises(nvrtc.KernelsUnavailableError, match=r"NVRTC 13\.0 compiled: .*UNSUPPORTED_PTX.*update"):
            launch()
    assert len(machine.compilations) == 1


def test_a_refused_source_is_remembered(machine: Machine) -> None:
    machine.refusal = "no such thing"
    for _ in range(3):
        with pytest.raises(nvrtc.KernelsUnavailableError, match="no such thing"):
            launch()
    assert len(machine.compilations) == 1


def test_what_may_pass_is_not_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_files(*_: object) -> bytes:
        raise nvrtc.KernelsUnavailableNowError("Too many open files")

    monkeypatch.setattr(driver, "compile_kernels", short_of_files)
    monkeypatch.setattr(driver, "_WAITS", 0)
    assert driver.functions_of(torch.device("cuda", 0), KERNEL) is None
    with pytest.raises(nvrtc.KernelsUnavailableError, match="Too many open files"):
        launch()
    monkeypatch.setattr(driver, "compile_kernels", machine.compile)
    launch()
    assert launched() in machine.fake.calls()


def test_what_may_pass_is_not_tried_at_every_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """But once twenty times as much time has gone by as the failure took."""
    now_s = [100.0]

    def slow(*_: object) -> bytes:
        now_s[0] += 3.0
        raise nvrtc.KernelsUnavailableNowError("OUT_OF_MEMORY")

    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(driver, "compile_kernels", slow)
    for now_s[0], after_s in ((100.0, 103.0), (104.0, 104.0), (162.0, 162.0), (164.0, 167.0)):
        with pytest.raises(nvrtc.KernelsUnavailableError, match="OUT_OF_MEMORY"):
            launch()
        assert now_s[0] == after_s
    monkeypatch.setattr(driver, "compile_kernels", machine.compile)
    now_s[0] = 300.0
    launch()
    assert launched() in machine.fake.calls()


def test_other_errors_of_the_driver_are_not_remembered(machine: Machine) -> None:
    machine.fake.fail_loads(719)
    with pytest.raises(driver.DriverError, match=r"the driver refused cuModuleLoadData: unknown error \(719\)"):
        launch()
    launch()
    with pytest.raises(driver.DriverError, match="cuLaunchKernel"):
        driver.launch(torch.device("cuda", 0), KERNEL, 0, 96, 1, 2)


def test_without_a_driver_the_kernels_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", missing)
    with pytest.raises(nvrtc.KernelsUnavailableError, match=r"not found \(libcuda\.so\.1"):
        driver.find_driver.__wrapped__()


def test_the_table_of_kernels_has_every_source() -> None:
    """All of a file are resolved when it is loaded; test_nvrtc.py compares the names of each."""
    assert set(driver.KERNELS) == {path.name for path in (nvrtc.source_folder() / "cuda").glob("*.cu")}
