"""What several tests of the estimators watch."""

from typing import Any

import pytest

from gact_dist.sensitivity import second_moment
from gact_dist.sensitivity.blocks import BlockForward, Visit


@pytest.fixture
def visited(monkeypatch) -> list[Visit]:
    """Receives each run of a block with its graph."""
    found: list[Visit] = []
    again = BlockForward.again

    def watched(self: BlockForward, visit: Visit, *arguments: Any) -> Any:
        found.append(visit)
        return again(self, visit, *arguments)

    monkeypatch.setattr(BlockForward, "again", watched)
    return found


@pytest.fixture
def exact_boundaries(monkeypatch) -> None:
    """What is kept at the borders of blocks is not rounded."""
    monkeypatch.setattr(second_moment, "BOUNDARY_BITS", None)
