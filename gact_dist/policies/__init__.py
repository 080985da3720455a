"""How many bits: pure functions from what was measured to a plan, one file a published policy."""

from .actnn import COLUMNS, Bits, SampleCosts, counts_of, one_width, plan_from, statistics
from .allocation import EXACT, WIDTHS, Allocation
from .base import Budget, Costs, StepBytes, allocate, policy_of, settled, with_bytes
from .gradient_samples import SAMPLES, GradientSamples
from .plan_search import Found, fewest_bits

__all__ = [
    "COLUMNS", "EXACT", "SAMPLES", "WIDTHS", "Allocation", "Bits", "Budget", "Costs", "Found", "GradientSamples",
    "SampleCosts", "StepBytes", "allocate", "counts_of", "fewest_bits", "one_width", "plan_from",
    "policy_of", "settled", "statistics", "with_bytes",
]  # fmt: skip
