"""How much each saved tensor moves the gradient, measured on this rank with the job left untouched."""

from .isolation import untouched
from .observation import Observation
from .one_pass import Sensitivity, measure
from .samples import Sample, of_batch, of_observation
from .second_moment import GradientError, Moments, rounded_moments

__all__ = [
    "GradientError",
    "Moments",
    "Observation",
    "Sample",
    "Sensitivity",
    "measure",
    "of_batch",
    "of_observation",
    "rounded_moments",
    "untouched",
]
