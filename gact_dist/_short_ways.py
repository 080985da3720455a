"""The classes of csrc/hooks, from which those inherit that short ways look into: of the hooks, and of the codec."""

from importlib import import_module
from typing import Any

try:
    _module: Any = import_module("gact_dist._hooks")
except ImportError:
    _module = None

IS_BUILT = _module is not None
"""whether there are short ways: without a C++ compiler there are none"""


def native_base(name: str) -> Any:
    """A class of that name to inherit from; object where none was built."""
    return getattr(_module, name) if IS_BUILT else object
