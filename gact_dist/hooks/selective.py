"""What a selective checkpoint keeps, in few bits.

[Note: selective checkpoints] A selective checkpoint keeps the results of some operators and makes all else of its
block again. torch holds them exactly, past all hooks. In a step that rounds they are stored like the block's inputs
instead. In the block that runs again each takes the place of what its operator would return, so the error of what it
was computed from ends there, and all that is computed from it is computed from what is stored. With exceptions:

* Results of fused attention, and logsumexp. Their backward reads the logsumexp beside the operands, which are made
  again from rounded tensors, and takes the exponential of the difference: where rows are sharp, gradients come out
  10^12 times too large. They are made again from the same operands. One with dropout would draw other random numbers; a
  block that keeps such a one is exact, with its inputs and all that it keeps.
* Of several results the first may be rounded. The others are what a backward needs beside it: the statistics of a norm,
  masks, indices. Nor is what has no gradient, whose effect nobody measures.
* Views, and what an operator writes in place: these are made again as well, without work. So is what relu returns, of
  which its backward reads where it is zero: a small element would mostly be rounded to that.
* What a collective returns may not have arrived: it is kept as it is, as are distributed tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from .._torch_internals import (
    RESPECTS_HOOKS,
    KeepingMode,
    KeptMode,
    Overload,
    RuntimeMode,
    has_effects,
    is_ignored_by_selective,
    modes_of_checkpoint,
    selective_context,
    selective_key,
)
from .handles import ReplayError

_SAVES = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor")


class Way(Enum):
    """What is done with a result."""

    ROUNDED = auto()
    CONSTANT = auto()  # it has no gradient, or a measurement has put another operator in the place of one that has
    EXACTLY = auto()  # or in fewer bits that lose nothing
    AGAIN = auto()  # nothing is kept of it


Keep = Callable[[Tensor, Any, Way], Any]
"""(result, operator, way) -> what restore() gives back"""


class Held:
    """In the place of a tensor among the results of an operator: what is kept of it."""

    __slots__ = ("handle",)

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Results:
    """What one call of a selective checkpoint keeps, in the order in which the operators ran."""

    def __init__(
        self, policy: Callable[..., Any], keep: Keep, draws: Callable[[], None], exactly: bool = False
    ) -> None:
        """policy: of the checkpoint. draws: called for attention with dropout that is to be kept. exactly: whether all
        is kept exactly that the policy says."""
        self._policy, self._keep, self._draws, self._exactly = policy, keep, draws, exactly
        self._kept: dict[Any, list[Any]] = defaultdict(list)  # by operator; None for what is made again

    def add(self, operator: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """An operator of the block's forward has run."""
        decision = self._policy(selective_context(result), operator, *args, **kwargs)
        saves = decision in _SAVES or (decision is not CheckpointPolicy.MUST_RECOMPUTE and has_effects(operator))
        kept, chooses = None, saves and not self._exactly
        if chooses and is_attention(operator) and _drops(operator, args, kwargs):
            self._draws()
        elif chooses and (is_attention(operator) or _is_made_by_no_work(operator)):
            saves = False
            tree_map_only(Tensor, lambda tensor: self._keep(tensor, operator, Way.AGAIN), result)
        if saves:
            first = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)), None)
            moves = torch.is_grad_enabled() and any(map(_requires_gradient, tree_leaves((args, kwargs))))
            way = Way.EXACTLY if self._exactly else Way.ROUNDED if moves else Way.CONSTANT

            def held(tensor: Tensor) -> Held:
                return Held(self._keep(tensor, operator, way if tensor is first else Way.EXACTLY))

            kept = tree_map_only(Tensor, held, result)
        self._kept[selective_key(operator, args)].append(kept)

    def get(self, operator: Any, args: tuple, counts: dict[Any, int]) -> Any:
        """What add() has kept of the same call; None for what is made again. counts: of the run, empty at first."""
        key = selective_key(operator, args)
        number = counts[key]
        counts[key] += 1
        kept = self._kept.get(key, [])
        if number >= len(kept) and not any(entry is not None for entry in kept):
            return None  # a cast that the forward had in autocast's cache
        if number >= len(kept):
            raise ReplayError(
                f"got {number + 1} calls of {operator} in a block that a selective checkpoint runs again, expected "
                f"{len(kept)}, as in its forward; a checkpointed function has to do the same whenever it runs"
            )
        return kept[number]


class Adding(RuntimeMode):
    """Within it results are added to Results."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return _add(self._results, func, args, kwargs or {})


class Taking(RuntimeMode):
    """Within it a block runs again, and place(result, handle) is told of each result that was kept, with its handle."""

    def __init__(self, results: Results, place: Callable[[Tensor, Any], None]) -> None:
        super().__init__()
        self._results, self._place = results, place
        self._counts: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_ignored_by_selective(func):
            kept = tree_leaves(self._results.get(func, args, self._counts))
            for tensor, held in zip(tree_leaves(result), kept, strict=False):
                if isinstance(held, Held):
                    shape = getattr(held.handle, "shape", tensor.shape)
                    if shape != tensor.shape:
                        raise ReplayError(
                            f"{func} returned the shape {tuple(tensor.shape)}, in the forward {tuple(shape)}"
                        )
                    self._place(tensor, held.handle)
        return result


class _KeepsResults(KeepingMode):
    """What a checkpoint's mode for the forward becomes."""

    results: Results

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return _add(self.results, func, args, kwargs or {})


class _TakesResults(KeptMode):
    """What its mode for the recomputation becomes."""

    results: Results

    def __enter__(self) -> Any:
        self.counts: dict[Any, int] = defaultdict(int)  # of this run
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if is_ignored_by_selective(func):
            return func(*args, **(kwargs or {}))
        kept = self.results.get(func, args, self.counts)
        if kept is None:
            return func(*args, **(kwargs or {}))
        return tree_map(lambda value: value.handle.restore() if isinstance(value, Held) else value, kept)


def _add(results: Results, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if not is_ignored_by_selective(func):
        results.add(func, args, kwargs, result)
    return result


def keep_results(frame: FrameType, keep: Keep, draws: Callable[[], None]) -> bool:
    """Have what a selective checkpoint keeps go through keep(); false for a checkpoint that is none, or whose modes are
    the user's own.

    frame: of a checkpoint whose block has yet to run. draws: see Results.
    """
    modes = modes_of_checkpoint(frame)
    if modes is None or not _are_of_torch(modes):
        return False
    keeping, kept = modes
    results = Results(keeping.policy_fn, keep, draws)
    for mode, kind in ((keeping, _KeepsResults), (kept, _TakesResults)):
        mode.__class__, mode.results = kind, results
    return True


def policy_of(context_fn: Callable[[], Any] | None) -> Callable[..., Any] | None:
    """The policy of a selective checkpoint, for one call; None for other contexts."""
    modes: Any = None if context_fn is None else context_fn()
    return modes[0].policy_fn if _are_of_torch(modes) else None


def _are_of_torch(modes: Any) -> bool:
    if modes is None or len(modes) != 2 or type(modes[0]) is not KeepingMode or type(modes[1]) is not KeptMode:
        return False
    wanted = getattr(modes[0], RESPECTS_HOOKS, None) is not False  # torch 2.14: that it stays as it is
    return wanted and not getattr(modes[1], "allow_cache_entry_mutation", False)


def is_attention(operator: Any) -> bool:
    """Whether a backward reads a logsumexp that an operator has returned, beside its operands."""
    name = str(operator).lower()
    return "attention" in name or "attn" in name or ".logsumexp." in f".{name}."


def _requires_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _drops(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether attention draws random numbers."""
    if not isinstance(operator, Overload):
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return any(bool(given.get(name)) for name in ("dropout_p", "p_dropout", "dropout"))


def _is_made_by_no_work(operator: Any) -> bool:
    """Whether an operator returns views, or what it was given to write to; or compares with zero."""
    return operator is torch.ops.aten.relu.default or shares_memory(operator)


def shares_memory(operator: Any) -> bool:
    """Whether an operator returns views, or what it was given to write to."""
    if not isinstance(operator, Overload):
        return False
    return any(returned.alias_info is not None for returned in operator._schema.returns)


def may_not_have_arrived(operator: Any) -> bool:
    """Whether what an operator returns is that of a collective, which must be waited for."""
    return getattr(operator, "namespace", "") in _COLLECTIVES


def running_with(mode: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a context around each run."""
    return partial(_run_with, mode, function)


def _run_with(mode: Callable[[], Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with mode():
        return function(*args, **kwargs)
