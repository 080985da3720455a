"""The CUDA kernels on a CPU: from their source by the emulation, and from their PTX."""

from collections.abc import Callable, Iterator

import pytest
from emulation import emulated_launch

from gact_dist.codec import cuda, nvrtc
from tools.ptx.machine import CACHE, Machine


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return emulated_launch(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def kernels(emulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of cuda.py take CPU tensors and run in the emulation."""
    monkeypatch.setattr(cuda, "launch", emulated)


@pytest.fixture(scope="session")
def compiler() -> nvrtc.Nvrtc:
    """NVRTC, which needs no GPU. tools/requirements-test.txt has its wheel."""
    return nvrtc.find_nvrtc()


@pytest.fixture
def machine(compiler: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The operators of cuda.py take CPU tensors and run their PTX; no thread may race with another."""
    machine = Machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))  # of what NVRTC compiles
    monkeypatch.setattr(cuda, "launch", machine.launch)
    yield machine
    assert machine.findings.races == 0, machine.findings.reports[:3]
