"""What a graph holds of tensors that are read once more, and are let go as that is done.

[Note: read once] The second derivative of a block runs the graph of its gradients once, together with its forward's,
which others need again: autograd frees both or none. So what the gradients' graph has saved is in holders, which are
empty when another node reads after the one that has read them. A node may ask several times for what it has saved.
"""

from __future__ import annotations

import threading

from torch import Tensor, nn

from .._torch_internals import node_in_backward, number_of
from .handles import ReplayError


class _Held:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        # that of a saved output would be a cycle that the collector cannot see; sharding swaps a parameter's data
        self.tensor: Tensor | None = tensor if isinstance(tensor, nn.Parameter) else tensor.detach()


class ReadOnce:
    """Holds what is saved, until the last backward has read it. See [Note: read once]."""

    def __init__(self) -> None:
        self.is_last = False
        """whether the backward that runs is the last one"""
        self._reading = threading.local()  # each device has a thread that runs its backwards

    def keep(self, tensor: Tensor) -> _Held:
        """The pack hook."""
        return _Held(tensor)

    def restore(self, held: _Held) -> Tensor:
        """The unpack hook."""
        tensor = held.tensor
        if tensor is None:
            raise ReplayError("a backward reads what an earlier one was to be the last to read")
        if self.is_last:
            self._note(held)
        return tensor

    def _note(self, held: _Held) -> None:
        node = node_in_backward()
        number = None if node is None else number_of(node)  # the node itself holds these hooks
        if number is None or getattr(self._reading, "number", None) != number:
            self._let_go()
            self._reading.number, self._reading.held = number, []
        self._reading.held.append(held)

    def _let_go(self) -> None:
        for held in getattr(self._reading, "held", ()):
            held.tensor = None
