"""The emulated CUDA kernels, compiled once a session for each element type and group size."""

from collections.abc import Callable

import pytest
from emulation import emulated_launch

from gact_dist.codec import cuda


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    return emulated_launch(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def kernels(emulated: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators of cuda.py take CPU tensors and run in the emulation."""
    monkeypatch.setattr(cuda, "_launch", emulated)
