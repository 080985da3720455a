"""Callbacks for trainers: gact_dist.integrations.transformers and gact_dist.integrations.lightning.

Each needs its framework installed, and is imported by its full name.
"""

__all__: list[str] = []
