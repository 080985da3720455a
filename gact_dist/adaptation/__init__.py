"""Bits from sensitivities: measure, reduce over the ranks and plan, once; and whether a plan may be used."""

from .adapter import Adaptation, Adapter, LearntByAdapting
from .verification import LearntByVerifying, Verifier

__all__ = ["Adaptation", "Adapter", "LearntByAdapting", "LearntByVerifying", "Verifier"]
