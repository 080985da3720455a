"""How much each saved tensor moves the gradient, measured on this rank with the job left untouched."""

from .autograd_graph import ExamplesRefusedError, MeasurementError
from .comparison import Comparison, compared
from .isolation import run_alone, untouched
from .one_pass import Paused, Sensitivity, measure, of_whole_batch
from .partition import blocks_of
from .probe import REFUSALS, Observation, ProbeBatch, ProbePart, inputs_of, kept
from .second_moment import note_blocks, rounded_moments

__all__ = [
    "REFUSALS",
    "Comparison",
    "ExamplesRefusedError",
    "MeasurementError",
    "Observation",
    "Paused",
    "ProbeBatch",
    "ProbePart",
    "Sensitivity",
    "blocks_of",
    "compared",
    "inputs_of",
    "kept",
    "measure",
    "note_blocks",
    "of_whole_batch",
    "rounded_moments",
    "run_alone",
    "untouched",
]
