"""Compressed activations for distributed training: see README.md."""

from importlib import import_module
from typing import Any

from . import codec
from .config import LEVELS, Config
from .controller import Controller, attach
from .distributed import PlanMismatchError
from .hooks import ReportRow
from .report import MemoryReport
from .steps import set_optimization_level

__version__ = "0.1.0"

__all__ = [
    "LEVELS",
    "Config",
    "Controller",
    "MemoryReport",
    "PlanMismatchError",
    "ReportRow",
    "attach",
    "codec",
    "set_optimization_level",
]


def __getattr__(name: str) -> Any:
    """gact_dist.deepspeed, imported when it is first asked for: it needs DeepSpeed."""
    if name == "deepspeed":
        return import_module(".deepspeed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
