"""The batch: tensors that the job's loop hands to the model, and holds itself.

[Note: given] A layer that reads the batch itself saves it, and the loop holds it anyway until it has the next one. So
it is neither stored again nor counted, and backward reads it as it is. What belongs to the batch is told by its memory:
the tensors in the arguments of the model's forward, those in the batch that step() is given, and views of them,
examples among these. What is computed from them, a cast for instance, does not. The input of a pipeline's stage is such
an argument, which its schedule holds until the stage's backward.

A loop may hand over what it does not hold: model(x.cuda()). The graph alone keeps such a copy, and rounding it saves
memory. That shows in backward, where nothing else refers to the memory; from the next step on the argument is stored as
others are.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from .._torch_internals import (
    PLAIN,
    is_inside_transform,
    storage_id,
    storage_reference,
    tensors_of_storage,
    without_subclass,
)
from ..distributed import own_part
from .accounting import parts_of
from .batches import tensors_of
from .handles import Kept
from .own_hooks import Calling, Registration, before_forward


class Given:
    """Knows the batch of the current step by its storages. See [Note: given]."""

    def __init__(self) -> None:
        self.not_held: set[int] = set()
        """arguments of the model's forward, by their number among its tensors, that the loop does not hold"""
        self._of_step: dict[int, _Memory] = {}
        self._of_forward: dict[int, _Memory] = {}

    def watch(self, model: nn.Module) -> Registration:
        """From now on know the arguments of a model's forward."""
        return before_forward(model, Calling(self._note_arguments), prepend=True, with_kwargs=True)

    def begin_step(self, batch: Any) -> None:
        """The batch of the step to come, None where it is not known."""
        self._of_step = _memories(enumerate(tensors_of(batch)), None)

    def add(self, examples: Any) -> None:
        """Copies of examples of a batch, which a measurement holds."""
        self._of_step |= _memories(enumerate(tensors_of(examples)), None)

    def begin_forward(self) -> None:
        """Forget the arguments of the forward before."""
        self._of_forward.clear()

    def _note_arguments(self, _: nn.Module, args: tuple, kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        """kwargs: not there where the hook was taken off by another in the same call."""
        if is_dynamo_compiling():
            return
        tensors = enumerate(tensor for value in (*args, *kwargs.values()) for tensor in _tensors_in(value))
        held = ((number, tensor) for number, tensor in tensors if number not in self.not_held)
        for key, memory in _memories(held, self.not_held).items():
            self._of_forward.setdefault(key, memory)

    @property
    def memories(self) -> tuple[dict[int, "_Memory"], ...]:
        """The storages that the batch is in, by storage_id(), as long as the forward runs."""
        return self._of_step, self._of_forward

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is part of the batch."""
        if tensor.grad_fn is not None:  # it may be a view of an argument that requires a gradient
            base = tensor._base
            return base is not None and base.grad_fn is None and self._memory_of(base) is not None
        return self._memory_of(tensor) is not None

    def holds_parts_of(self, tensor: Tensor) -> bool:
        """The same of a sparse tensor, or of one that wraps others."""
        parts = [] if tensor.requires_grad else parts_of(tensor)
        return bool(parts) and all(type(part) in PLAIN and self._memory_of(part) is not None for part in parts)

    def keep(self, tensor: Tensor) -> Kept:
        """The handle of a tensor that holds() has found."""
        memory = self._memory_of(tensor)
        return Kept(tensor) if memory is None or memory.not_held is None else _Argument(tensor, memory)

    def _memory_of(self, tensor: Tensor) -> "_Memory | None":
        if not self._of_forward and not self._of_step:
            return None
        key = storage_id(tensor)
        return self._of_step.get(key) or self._of_forward.get(key)


class _Memory:
    """A storage that tensors of a batch are in."""

    __slots__ = ("handles", "not_held", "number", "reference")

    def __init__(self, tensor: Tensor, number: int, not_held: set[int] | None) -> None:
        """not_held: where to note the number if the graph alone holds it; None if that is known not to be so."""
        self.reference = storage_reference(tensor)  # while it lives no other storage has its id
        self.number, self.not_held = number, not_held
        self.handles: WeakSet[_Argument] = WeakSet()

    def examine(self) -> None:
        """In a backward: see who holds it."""
        if self.not_held is not None and tensors_of_storage(self.reference) <= len(self.handles):
            self.not_held.add(self.number)


class _Argument(Kept):
    """An argument of the model's forward."""

    __slots__ = ("__weakref__", "_memory")

    def __init__(self, tensor: Tensor, memory: _Memory) -> None:
        super().__init__(tensor)
        self._memory = memory
        memory.handles.add(self)

    def restore(self) -> Tensor:
        """See Kept.restore."""
        self._memory.examine()
        return super().restore()


def _tensors_in(value: Any) -> list[Tensor]:
    """In an argument; also in the attributes of an object that is no container, as of PyTorch Geometric's Data."""
    found = tensors_of(value)
    if found or isinstance(value, (nn.Module, type)) or callable(value):
        return found
    return tensors_of(getattr(value, "__dict__", None))


def _memories(tensors: Iterable[tuple[int, Tensor]], not_held: set[int] | None) -> dict[int, _Memory]:
    """By storage_id(). tensors: with their numbers."""
    found: dict[int, _Memory] = {}
    for number, tensor in tensors:
        if isinstance(tensor, nn.Parameter) or is_inside_transform(tensor):
            continue
        for part in parts_of(own_part(tensor)):
            plain = part if type(part) in PLAIN else without_subclass(part)
            if plain is not None and plain.grad_fn is None:
                found.setdefault(storage_id(plain), _Memory(plain, number, not_held))
    return found
