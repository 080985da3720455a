"""What autograd saves: its name, its role, what is kept of it, and the handle that gives it back."""

from .batches import batch_size, first_samples, map_tensors, tensors_of
from .checkpoint import recomputing
from .compiled import has_compiled_parts
from .encoder import Packer
from .engine import Engine
from .footprint import Footprint
from .handles import Recorded, SavedTensorRow
from .roles import OperatorObserver

__all__ = [
    "Engine",
    "Footprint",
    "OperatorObserver",
    "Packer",
    "Recorded",
    "SavedTensorRow",
    "batch_size",
    "first_samples",
    "has_compiled_parts",
    "map_tensors",
    "recomputing",
    "tensors_of",
]
