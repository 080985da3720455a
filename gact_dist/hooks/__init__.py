"""What autograd saves: its name, its role, what is kept of it, and the handle that gives it back."""

from .accounting import Footprint, ReportRow
from .batches import batch_size, first_samples, map_tensors, may_hold_adjacency, tensors_of
from .checkpoint import recomputing
from .compiled import has_compiled_parts
from .encoder import Encoder
from .engine import LearntNames, SavedTensorHooks
from .handles import Recorded
from .inlined import check_inlined
from .roles import OperatorObserver

__all__ = [
    "Encoder", "Footprint", "LearntNames", "OperatorObserver", "Recorded", "ReportRow", "SavedTensorHooks",
    "batch_size", "check_inlined", "first_samples", "has_compiled_parts", "map_tensors", "may_hold_adjacency",
    "recomputing", "tensors_of",
]  # fmt: skip
