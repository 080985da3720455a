"""Where the memory of a training step goes, before it is spent: `profile` runs a job on real or fake tensors."""

from .building import with_small_values
from .engine import DEFAULT_LEVELS, UNTOUCHED, profile
from .layouts import LAYOUTS, OPTIMIZERS, ProfileError, Settings
from .result import KINDS, KeptTensor, LevelProfile, Profile, Share

__all__ = [
    "DEFAULT_LEVELS",
    "KINDS",
    "LAYOUTS",
    "OPTIMIZERS",
    "UNTOUCHED",
    "KeptTensor",
    "LevelProfile",
    "Profile",
    "ProfileError",
    "Settings",
    "Share",
    "profile",
    "with_small_values",
]
