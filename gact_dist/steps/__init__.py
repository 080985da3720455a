"""The steps of one model: what is open around a forward, when bits adapt, and what is saved of it."""

from .following import Following
from .gact_api import Iterations, default_level, set_optimization_level
from .schedule import Schedule, is_attached
from .state import read_state, state_key, write_state

__all__ = [
    "Following",
    "Iterations",
    "Schedule",
    "default_level",
    "is_attached",
    "read_state",
    "set_optimization_level",
    "state_key",
    "write_state",
]
