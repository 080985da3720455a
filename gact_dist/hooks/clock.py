"""The seconds that the hooks take."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

from torch import Tensor


class Clock:
    """A context that adds up the host's seconds within it. On a GPU that is how long the launches take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += perf_counter()

    def take(self) -> float:
        """The seconds since this was called last."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def timed(self, unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        """An unpack hook whose seconds count. It holds no more than the clock and the hook."""

        def timed(handle: Any) -> Tensor:
            with self:
                return unpack(handle)

        return timed
