"""Custom functions that run again in a backward, on what is stored of their inputs.

[Note: functions again] A function that combines its inputs with what it computed from them, as a fused attention does,
has all of that kept exactly ([Note: custom functions] in custom_functions.py). Under a checkpoint of its own it keeps
its inputs alone, in few bits, and whatever it computes from these fits them. So where bits adapt such functions get
one: `apply` of their class is replaced while the hooks are attached, and opens a checkpoint around a call inside of a
forward of the model under our hooks. All else (names, bits, sensitivities) is that of a user's checkpoint.

Nobody has asked for this checkpoint, so a function is tried before. A call of the next forward is watched: one that
communicates is left alone, as its calls would reach other ranks in another order. Between that forward and the one
after it the call is made again, directly and under a checkpoint. Both must give the same results, bit for bit, and the
same gradients but for the order of additions, and nothing may be written to its arguments. What cannot be watched, as
`attend = FlashAttention.apply` that was looked up before, stays exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import _fields
from .._patches import replaced
from .._torch_internals import (
    APPLY_HAS_FRAME,
    DispatchMode,
    in_backward,
    innermost_hooks,
    runs_transform,
    without_modes,
)
from ..distributed import say
from .checkpoint import running_checkpoints
from .function_calls import arguments_known, is_plain
from .naming import Namer
from .roles import leaves_of

_log = logging.getLogger(__name__)
_OWN = __name__.partition(".")[0]
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
"""namespaces of operators"""
_DIFFERENCE = 0.01  # of a gradient, which kernels may add up in any order


class LearntFunctions(NamedTuple):
    """What was learnt of custom functions in earlier steps, by name."""

    running: list[str]
    proposed: dict[str, str]
    """with a place that calls it"""


class FunctionsAgain:
    """Those of one model. See [Note: functions again]."""

    def __init__(self, namer: Namer, wanted: bool) -> None:
        """namer: tells whether the model's forward is running. wanted: whether any function is to run again."""
        self._namer, self._wanted = namer, wanted
        self._met: set[type] = set()
        self._proposed: dict[type, str] = {}  # with a place that calls it
        self._watched: dict[type, list[Any]] = {}  # arguments of a call; none where it communicates
        self._running: set[type] = set()
        self._unsaid: dict[type, str] = {}  # of those that run again, with a place
        self._known: dict[str, str | None] = {}  # by name, of an earlier process: with a place if it is only proposed
        self._block: bool | None = None  # whether the block that runs alone is one that a checkpoint runs
        finalize(self, _leave_unowned).atexit = False

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, in plain values."""
        proposed = {_name_of(function): place for function, place in self._proposed.items()}
        known = {name: place for name, place in self._known.items() if place is not None}
        running = {*map(_name_of, self._running), *(name for name, place in self._known.items() if place is None)}
        return {"running": sorted(running), "proposed": known | proposed}

    @staticmethod
    def parse_state(name: str, value: Any) -> LearntFunctions:
        """What load_state() takes, from what state_dict() gave. Raises StateError."""
        learnt = _fields.mapping(_fields.anything)(name, value)
        running = _fields.read(learnt, "running", _fields.sequence(_fields.text), [])
        return LearntFunctions([*running], dict(_fields.read(learnt, "proposed", _fields.mapping(_fields.text), {})))

    def load_state(self, learnt: LearntFunctions) -> None:
        """Go on with what parse_state() returned. Some of the functions may not be defined yet."""
        self.remove()
        self._running.clear()
        self._proposed.clear()
        self._known = {**dict.fromkeys(learnt.running), **learnt.proposed}

    def propose(self, function: type, place: str) -> None:
        """A function that is saving in a step keeps exactly what would be rounded otherwise."""
        if self._is_eligible(function):
            self._met.add(function)
            self._proposed[function] = place

    def may_follow(self, function: type) -> bool:
        """Whether a function that is saving now may turn out to run again in later forwards."""
        is_new = function in self._proposed and self not in _owners.get(function, ())
        return is_new or function in self._watched or self._is_eligible(function)

    def _is_eligible(self, function: type) -> bool:
        """Whether it was not met before and its apply can be replaced."""
        if function in self._met or not self._wanted or self._namer.scope.compiled:
            return False
        return function in _owners or "apply" not in vars(function)

    def begin(self) -> bool:
        """Between forwards. Whether functions are watched or run again from now on that were not."""
        if self._known:
            self._find_known()
        watched, self._watched = self._watched, {}
        found = [function for function, arguments in watched.items() if _gives_the_same(function, arguments)]
        self._run_again(found)
        self._unsaid |= {function: self._proposed[function] for function in found}
        for function in watched:
            del self._proposed[function]
            if function not in found:
                self._leave(function)
        unwatched = [function for function in self._proposed if self not in _owners_of(function)]
        for function in unwatched:
            _owners_of(function).add(self)
        return bool(found or unwatched)

    def _find_known(self) -> None:
        """Those of an earlier process that are defined by now."""
        found = [each for each in _subclasses(torch.autograd.Function) if _name_of(each) in self._known]
        places = {function: self._known[_name_of(function)] for function in found}
        self._run_again(function for function, place in places.items() if place is None)
        self._proposed |= {function: place for function, place in places.items() if place is not None}
        self._met.update(found)
        for name in {*map(_name_of, found)}:
            del self._known[name]

    def _run_again(self, functions: Iterable[type]) -> None:
        for function in functions:
            self._running.add(function)
            _owners_of(function).add(self)

    def resume(self) -> None:
        """Undo remove()."""
        self._run_again([*self._running])

    def remove(self) -> None:
        """Leave all functions as they are."""
        for function in {*self._running, *self._proposed}:
            self._leave(function)

    def _leave(self, function: type) -> None:
        if function in _owners:
            _owners[function].discard(self)
            _leave_unowned()

    def call(self, function: type, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Of a function, in place of plain(*arguments)."""
        if function in self._running:
            if function in self._unsaid:
                say(
                    _log,
                    "%s, and wherever else it is called by its class, runs again in backward on its inputs in few "
                    "bits, as under a checkpoint; with derive=False all that it saves is kept exactly, at less time",
                    self._unsaid.pop(function),
                    level=logging.INFO,
                )
            return checkpoint(plain, *arguments, use_reentrant=False)
        if function in self._watched:
            return plain(*arguments)
        # sharding takes a parameter away before the call is made again
        kept = (each.clone() if isinstance(each, nn.Parameter) else each for each in arguments)
        self._watched[function] = [*map(_without_graph, kept)]
        with _Watching() as watching:
            result = plain(*arguments)
        if watching.communicates:
            self._watched[function].clear()
        return result

    def block(self, checkpointed: bool) -> AbstractContextManager[None]:
        """A context in which a block of the model runs alone. checkpointed: whether a checkpoint runs it in a job."""
        return replaced(self, "_block", checkpointed)

    def takes(self, arguments: Sequence[Any]) -> bool:
        """Whether a call that is about to be made is to run again."""
        is_own = bool(self._namer.scope.stack) if self._block is None else not self._block
        if not is_own or self._namer.scope.compiled or not torch.is_grad_enabled() or in_backward():
            return False
        top = innermost_hooks()
        if top is None or not _is_ours(top[0]) or running_checkpoints():
            return False
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        in_containers = sum(isinstance(leaf, Tensor) for leaf in leaves_of(arguments)) - len(tensors)
        needs_gradient = any(tensor.requires_grad for tensor in tensors)
        return needs_gradient and not in_containers and not runs_transform() and all(map(is_plain, tensors))


def _is_ours(hook: Any) -> bool:
    """Whether a pack hook is one of this package: a function of Python's, or a method of what has the short way."""
    module = getattr(hook, "__module__", None) or type(getattr(hook, "__self__", None)).__module__
    return module.startswith(f"{_OWN}.")


_owners: WeakKeyDictionary[type, WeakSet[FunctionsAgain]] = WeakKeyDictionary()
"""of each function whose apply is replaced"""


def _owners_of(function: Any) -> WeakSet[FunctionsAgain]:
    owners = _owners.get(function)
    if owners is None:
        owners = _owners[function] = WeakSet()
        function.apply = classmethod(_applying(function, owners))
    return owners


def _leave_unowned() -> None:
    """Give functions their own apply again that no model needs any more."""
    unowned: list[Any] = [function for function, owners in _owners.items() if not owners]
    for function in unowned:
        del _owners[function]
        del function.apply


def _applying(function: Any, owners: WeakSet[FunctionsAgain]) -> Any:
    def apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        plain = _plain(function, cls)
        if cls is function and not keywords:
            for owner in owners:
                if owner.takes(arguments):
                    return owner.call(function, plain, arguments)
        return plain(*arguments, **keywords)

    return apply


def _plain(function: Any, cls: Any) -> Callable[..., Any]:
    """The apply that a class has without ours. Where it has no frame, ours tells what it is given."""
    plain: Callable[..., Any] = super(function, cls).apply
    if APPLY_HAS_FRAME or cls is not function:
        return plain

    def told(*arguments: Any, **keywords: Any) -> Any:
        with arguments_known(function, arguments):
            return plain(*arguments, **keywords)

    return told


class _Watching(DispatchMode):
    """Notes whether operators communicate."""

    communicates = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.communicates |= operator.namespace in _COMMUNICATING
        return operator(*args, **(kwargs or {}))


def _gives_the_same(function: Any, arguments: Sequence[Any]) -> bool:
    """Whether a call under a checkpoint gives what the call itself gives. arguments: none if it is not to be made."""
    if not arguments or any(isinstance(each, Tensor) and not _is_there(each) for each in arguments):
        return False
    plain = _plain(function, function)
    try:
        results, gradients, writes = _called(plain, arguments)
        again, gradients_again, _ = _called(partial(checkpoint, plain, use_reentrant=False), arguments)
        same = len(results) == len(again) and len(gradients) == len(gradients_again)
        same = same and all(map(torch.equal, results, again)) and all(map(_are_close, gradients, gradients_again))
        return same and not writes
    except Exception as error:  # a function of the user's may raise anything
        _log.debug("%s cannot run again: %r", _name_of(function), error)
        return False


def _called(call: Callable[..., Any], arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    """(results, gradients of its inputs, whether it writes to its arguments) of a call."""
    given = [_without_graph(each.clone() if isinstance(each, Tensor) else each) for each in arguments]
    inputs = [argument for argument in given if isinstance(argument, Tensor)]
    devices = {argument.device for argument in inputs if not argument.is_cpu}
    kind = next((device.type for device in devices), "cuda")
    with without_modes(), torch.enable_grad(), torch.random.fork_rng([*devices], device_type=kind):
        made = call(*given)
        writes = any(argument._version for argument in inputs)  # a backward may: what it reads is made for it alone
        results = [made] if isinstance(made, Tensor) else [result for result in made if isinstance(result, Tensor)]
        heads = [result for result in results if result.requires_grad]
        wanted = [argument for argument in inputs if argument.requires_grad]
        found = torch.autograd.grad(heads, wanted, [head.detach() for head in heads], allow_unused=True)
    gradients = [gradient for gradient in found if gradient is not None]
    return [result.detach() for result in results], gradients, writes


def _is_there(tensor: Tensor) -> bool:
    """Whether nothing has taken the memory away meanwhile, as sharding does that of a view of a parameter."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


def _are_close(one: Tensor, other: Tensor) -> bool:
    one, other = one.float(), other.float()
    return bool((one - other).norm() <= _DIFFERENCE * one.norm())


def _without_graph(argument: Any) -> Any:
    return argument.detach().requires_grad_(argument.requires_grad) if isinstance(argument, Tensor) else argument


def _name_of(function: type) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _subclasses(function: Any) -> Iterator[type]:
    below: Any
    for below in function.__subclasses__():
        yield below
        yield from _subclasses(below)
