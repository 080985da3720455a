"""Compressed activations for distributed training: see README.md."""

from . import codec
from .config import LEVELS, Config
from .controller import Controller, attach, set_optimization_level
from .report import MemoryReport, ReportRow
from .sync import PlanMismatchError

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
