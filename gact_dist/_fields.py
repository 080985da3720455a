"""Reading a saved state: the type and range of every value are checked before any of the state is used."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_MISSING = object()


class StateError(ValueError):
    """A value in a state cannot be used; the message names it."""


def read(state: Mapping[str, Any], name: str, check: Callable[[str, Any], _T], default: Any = _MISSING) -> _T:
    """The value of a key, as ``check(name, value)`` returns it; the default if an older state lacks the key.

    Raises StateError if the key is missing and there is no default, and whatever the check raises.
    """
    if name not in state:
        if default is _MISSING:
            raise StateError(f"{name!r} is missing")
        return default
    return check(name, state[name])


def integer(least: int) -> Callable[[str, Any], int]:
    """A check for whole numbers of at least ``least`` and below 2**63."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise StateError(f"{name!r} is {_shown(value)}, expected a whole number of at least {least}")
        return value

    return check


def number(least: float = -math.inf) -> Callable[[str, Any], float]:
    """A check for numbers of at least ``least``; infinities pass, NaN does not."""

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
            raise StateError(f"{name!r} is {_shown(value)}, expected a number" + _at_least(least))
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """A check for true and false."""
    if not isinstance(value, bool):
        raise StateError(f"{name!r} is {_shown(value)}, expected true or false")
    return value


def text(name: str, value: Any) -> str:
    """A check for text."""
    if not isinstance(value, str):
        raise StateError(f"{name!r} is {_shown(value)}, expected text")
    return value


def optional(check: Callable[[str, Any], _T]) -> Callable[[str, Any], _T | None]:
    """A check that lets None pass."""
    return lambda name, value: None if value is None else check(name, value)


def mapping(check: Callable[[str, Any], _T]) -> Callable[[str, Any], dict[str, _T]]:
    """A check for a mapping with text keys, whose values each pass a check."""

    def check_all(name: str, value: Any) -> dict[str, _T]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise StateError(f"{name!r} is {_shown(value)}, expected keys and values")
        return {key: check(f"{name}.{key}", item) for key, item in value.items()}

    return check_all


def sequence(check: Callable[[str, Any], _T]) -> Callable[[str, Any], list[_T]]:
    """A check for a list, whose items each pass a check."""

    def check_all(name: str, value: Any) -> list[_T]:
        if not isinstance(value, (list, tuple)):
            raise StateError(f"{name!r} is {_shown(value)}, expected a list")
        return [check(f"{name}[{number}]", item) for number, item in enumerate(value)]

    return check_all


def anything(name: str, value: Any) -> Any:
    """A check that every value passes."""
    return value


def _at_least(least: float) -> str:
    return "" if least == -math.inf else f" of at least {least:g}"


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown[:60]}... ({type(value).__name__})" if len(shown) > 60 else f"{shown} ({type(value).__name__})"
