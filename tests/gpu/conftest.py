"""What the tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Two runs of the same job agree bit by bit, so that a run with offload can be compared with one without."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)
