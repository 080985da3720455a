"""Which scores of attention a mask hides, where the model adds it itself.

[Note: hidden scores] A sum saves none of its operands, so a mask that is added to scores is not known in the backward.
Where hiding is all that it does, its numbers being zero or at most -1e4, the probabilities show it: they are zero
there, and one bit of each is kept, or one for all heads where their mask is the same. All of a row may be hidden by a
number that is finite; then its probabilities are equal, and none of its bits is set. That the mask does no more an
observed step shows, which looks at its values; what has the same name later is trusted to be like it. Any other sum
with something that has no graph ends the recipe of probabilities, and they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import codec
from .._torch_internals import is_fake

_HIDES = "gact_dist: hides scores"
_ADDS_NUMBER = "gact_dist: adds a number"
_HIDDEN = -1e4
"""a mask adds this or less to scores that are hidden"""
FILLS = "MaskedFillBackward0"
_MASKED_PRODUCT = "BaddbmmBackward0"
_HEADS, _HEADED = -3, 4
"""the dimension of heads, where there are so many dimensions"""
_ADDS = frozenset(("AddBackward0", _MASKED_PRODUCT))


def may_hide(node: Any) -> bool:
    """Whether a node may hide some scores: it fills something in, or adds something without a graph."""
    return node.name() == FILLS or (node.name() in _ADDS and any(below is None for below, _ in node.next_functions))


def before(node: Any) -> tuple[Any, int]:
    """The edge that gives the scores."""
    edge: tuple[Any, int] = next(edge for edge in node.next_functions if edge[0] is not None)
    return edge


class Masks(NamedTuple):
    """That do no more to scores than to hide some."""

    number: int | None
    """None for any"""
    are_of_all_heads: bool = False
    """whether each hides the same in all heads"""
    is_number: bool = False
    """of any other sum with something that has no graph: whether that is one number"""


NO_MASKS, ANY_MASKS = Masks(0), Masks(None, is_number=True)


def note_hiding(
    node: Any, tensors: Iterable[Tensor], numbers: Sequence[float], holds_mask: Callable[[Tensor], bool]
) -> None:
    """In a step that is observed: whether a node that may hide scores does no more. May wait for the device.

    tensors, numbers: among the operands of its operator. holds_mask: what is known of a tensor that has no values.
    """
    masks = [tensor for tensor in tensors if not tensor.requires_grad]
    node.metadata[_ADDS_NUMBER] = node.name() == "AddBackward0" and bool(numbers) and not masks
    if node.name() == FILLS:
        found = len(masks) == len(numbers) == 1 and numbers[0] <= _HIDDEN
    else:
        found = len(masks) == 1 and masks[0].is_floating_point() and node._saved_alpha == 1
        found = found and (holds_mask if is_fake(masks[0]) else _hides)(masks[0])
    shape = masks[0].shape if found else ()
    node.metadata[_HIDES] = Masks(1, len(shape) < -_HEADS or shape[_HEADS] == 1) if found else None


def _hides(mask: Tensor) -> bool:
    return bool(((mask == 0) | (mask <= _HIDDEN)).all())


def adds_number(node: Any) -> bool | None:
    """Whether a sum with something that has no graph adds one number; None where no observer has seen it."""
    found: bool | None = node.metadata.get(_ADDS_NUMBER)
    return found


def masks_of(masking: Sequence[Any], known: Masks) -> Masks | None:
    """Of nodes that may hide scores; None if they do more.

    known: what earlier steps have found, for a step that is not observed.
    """
    found = [node.metadata.get(_HIDES, known) for node in masking]
    if any(each is known for each in found):
        return known if known.number in (None, len(masking)) else None
    if any(each is None for each in found):
        return None
    return Masks(len(found), all(each.are_of_all_heads for each in found))


def is_observed(masking: Sequence[Any]) -> bool:
    """Whether an observer has seen all of these nodes."""
    return all(_HIDES in node.metadata for node in masking)


def is_masked_product(node: Any) -> bool:
    """Whether a node adds a product of matrices to its mask."""
    return node is not None and node.name() == _MASKED_PRODUCT


class Shown:
    """In a recipe: which probabilities are not hidden. See [Note: hidden scores]."""

    __slots__ = ("_packed",)

    def __init__(self, tensor: Tensor, dim: int, masks: Masks) -> None:
        """tensor: the probabilities, whose rows are along dim. masks: that hide the others."""
        with torch.no_grad():
            equal = tensor.amax(dim, keepdim=True) == tensor.amin(dim, keepdim=True)
            shown = (tensor != 0).logical_and_(equal.logical_not_())
            if masks.are_of_all_heads and tensor.dim() == _HEADED:
                shown = shown.any(_HEADS, keepdim=True)
            self._packed = codec.pack_mask(shown)

    @property
    def nbytes(self) -> int:
        return self._packed.nbytes

    def restore(self) -> Tensor:
        """Of booleans."""
        return codec.unpack(self._packed)
