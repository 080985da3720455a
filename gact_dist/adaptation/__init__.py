"""Bits from sensitivities: measure, reduce over the ranks and plan, once; and whether a plan may be used."""

from .adapter import Adaptation, AdaptationInSteps, Adapter, Haste, LearntByAdapting
from .verification import LearntByVerifying, Verifier

__all__ = [
    "Adaptation",
    "AdaptationInSteps",
    "Adapter",
    "Haste",
    "LearntByAdapting",
    "LearntByVerifying",
    "Verifier",
]
