"""A place for what a test counts in forwards that are measured: a measurement sets everything back that it finds."""

from __future__ import annotations

from typing import Any


class Unseen:
    """Holds a value; an object with slots is not looked into."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
