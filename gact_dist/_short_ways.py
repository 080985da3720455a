"""The classes of csrc/hooks, from which those inherit that short ways look into: of the hooks, and of the codec."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ._sources import OTHER_SOURCES, is_of_these_sources


def _load() -> tuple[Any, str]:
    """(the module, "") or (None, the reason why there is none)."""
    try:
        found = find_spec("gact_dist._hooks")
        if found is not None and found.origin is not None and not is_of_these_sources(found.origin):
            return None, OTHER_SOURCES
        return import_module("gact_dist._hooks"), ""
    except (ImportError, OSError) as error:
        return None, str(error)


_module, NOT_BUILT = _load()
IS_BUILT = _module is not None
"""whether there are short ways: without a C++ compiler there are none. Why is in NOT_BUILT."""


def native_base(name: str) -> Any:
    """A class of that name to inherit from; object where none was built."""
    return getattr(_module, name) if IS_BUILT else object
