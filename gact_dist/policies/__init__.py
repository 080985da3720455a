"""How many bits each saved tensor gets: pure functions from what the ranks measured to a plan, one file a policy."""

from .actnn import counts_of, statistics
from .allocation import WIDTHS
from .base import Costs, GradientError, Moments, Policy, StepBytes, Trial
from .gact import plan_of_equals, with_bytes
from .plan import Bits, Plan, bits_from_state, one_width
from .registry import policy_of

__all__ = [
    "WIDTHS", "Bits", "Costs", "GradientError", "Moments", "Plan", "Policy", "StepBytes", "Trial",
    "bits_from_state", "counts_of", "one_width", "plan_of_equals", "policy_of", "statistics", "with_bytes",
]  # fmt: skip
