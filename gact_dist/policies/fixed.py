"""Policies that measure nothing: the same bits for every tensor, every tensor exactly, or no compression at all."""

from .base import Policy


class Uniform(Policy):
    """The same bits for every tensor."""


class Exact(Policy):
    """All the machinery, every tensor stored exactly: for finding faults."""

    rounds = False


class Off(Policy):
    """The job is left alone."""

    compresses = False
    rounds = False
