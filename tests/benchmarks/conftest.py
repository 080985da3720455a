"""What the tests of benchmarks share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def what_was_imported_is_not_searched() -> Iterator[None]:
    """gc.collect(), which benchmarks call before they measure, takes 0.3 s over all modules that torch imports."""
    gc.freeze()
    yield
    gc.unfreeze()
