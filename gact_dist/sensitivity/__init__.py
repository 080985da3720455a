"""How much each saved tensor moves the gradient, measured on this rank with the job left untouched."""

from .isolation import untouched
from .one_pass import Sensitivity, measure
from .probe import Observation, ProbeBatch
from .second_moment import rounded_moments

__all__ = [
    "Observation",
    "ProbeBatch",
    "Sensitivity",
    "measure",
    "rounded_moments",
    "untouched",
]
