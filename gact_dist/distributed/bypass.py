"""Running a model without the wrappers that a job puts around it, its parameters gathered part by part.

[Note: sharded probe] Sensitivity needs a double backward over an ordinary module. Sharding frees parameters after use
and answers every forward and backward with collectives and state of its own. So, for one measurement, the wrapper's
hooks are taken off the modules, except for its casts of inputs and outputs, and come back afterwards: the wrapper never
sees that a forward ran. Parameters are gathered as the wrapper itself gathers them (FSDPModule.unshard, the unshard of
FSDP's handles, zero.GatheredParameters), in the type the job computes in. bypassed() gathers what lies outside the
given parts of the model, and gathered() one part at a time, so that a rank holds no more than these two at once. What
is whole already is left alone: a parameter that two parts share, or a unit that the job itself keeps unsharded.

[Note: roll call] A rank that fails in the middle, out of memory for instance, gathers nothing any more, and the others
would wait for it in their next gathering. So before every part the ranks that share its shards tell each other with one
all-reduce of 4 bytes that they go on, and so they do at the end. A rank that fails takes part once more, and says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any

from torch import nn

from .._patches import replaced
from .._torch_internals import run_by
from .collectives import all_ranks
from .framework import Framework, cast_floating
from .wrappers import FRAMEWORKS, sharding, unwrap

_NOTHING = nullcontext()
_gatherings: dict[nn.Module, Callable[[], AbstractContextManager[None]]] = {}
"""while a sharded model is bypassed, what gathers each part"""


class PeerFailedError(Exception):
    """Another rank has failed while a sharded model was bypassed; raised on those that share its shards."""


@contextmanager
def bypassed(model: nn.Module, parts: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Every wrapper passed over as if it were not there, and parameters outside the parts whole.

    parts: modules inside the model, none inside another; gathered() gathers their parameters. Parameters that are
    sharded as one with any outside the parts are gathered as well.
    A collective call where parameters are sharded: all ranks of the sharding group must enter it, with the same parts.
    Raises PeerFailedError if another of these ranks leaves it by an error.
    See [Note: sharded probe].
    """
    with ExitStack() as stack:
        for framework in FRAMEWORKS:
            stack.enter_context(framework.plain_forward())
        if sharding(model) is not None:
            outside, inside = _divided(model, parts)
            stack.enter_context(_gathered(outside))
            ranks = stack.enter_context(_RollCall(model))
            stack.enter_context(_known({part: partial(ranks.gathered, inside[part]) for part in parts}))
        stack.enter_context(_hooks_aside(model))
        yield


def gathered(part: nn.Module) -> AbstractContextManager[None]:
    """Within bypassed(model, parts): the parameters of one of the parts whole, in the type that the job computes in.

    Its parameters must be read within the context: they may be other objects at every entry.
    A collective call where parameters are sharded; nothing, and quickly so, where they are not.
    Raises PeerFailedError if a rank that should take part has failed.
    """
    gathering = _gatherings.get(part)
    return _NOTHING if gathering is None else gathering()


@contextmanager
def gathered_in_turn(model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[None]:
    """bypassed(), with each part gathered for every forward of its own, and for no longer: no backward can follow."""
    with bypassed(model, parts), ExitStack() as stack:
        for part in parts:
            name, function = run_by(part)
            stack.enter_context(replaced(part, name, _with_gathering(part, function)))
        yield


def _with_gathering(part: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def gathering(*inputs: Any, **kwargs: Any) -> Any:
        with gathered(part):
            return forward(*inputs, **kwargs)

    return gathering


@contextmanager
def _gathered(modules: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for framework in FRAMEWORKS:
            stack.enter_context(framework.gathered(modules))
        yield


def _divided(model: nn.Module, parts: Sequence[nn.Module]) -> tuple[list[nn.Module], dict[nn.Module, list[nn.Module]]]:
    """The modules outside the parts, and those of each part; a wrapper belongs to the part that it wraps."""
    owners = {module: part for part in parts for module in part.modules()}
    outside: list[nn.Module] = []
    inside: dict[nn.Module, list[nn.Module]] = {part: [] for part in parts}
    for module in model.modules():
        part = owners.get(unwrap(module))
        (outside if part is None else inside[part]).append(module)
    return outside, inside


class _RollCall(AbstractContextManager["_RollCall"]):
    """Gathers parts of a model while every rank that takes part goes on. See [Note: roll call]."""

    def __init__(self, model: nn.Module) -> None:
        self._groups = dict.fromkeys(group for framework in FRAMEWORKS for group in framework.sharding_groups(model))

    def gathered(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        self._answer(True)
        return _gathered(modules)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._answer(True)
        elif isinstance(error, Exception) and not isinstance(error, PeerFailedError):
            with suppress(PeerFailedError):
                self._answer(False)

    def _answer(self, going_on: bool) -> None:
        for group in self._groups:
            going_on = all_ranks(going_on, group)
        if not going_on:
            raise PeerFailedError("another rank has failed, and can no longer take part in gathering parameters")


@contextmanager
def _known(gatherings: dict[nn.Module, Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    """Within the context gathered() knows these parts."""
    _gatherings.update(gatherings)
    try:
        yield
    finally:
        for part in gatherings:
            del _gatherings[part]


@contextmanager
def _hooks_aside(model: nn.Module) -> Iterator[None]:
    """Within the context the frameworks' forward hooks on modules are gone, except for their casts."""
    changed: list[tuple[dict, dict]] = []
    for module in model.modules():
        for hooks, cast in ((module._forward_pre_hooks, _input_cast), (module._forward_hooks, _output_cast)):
            theirs = {key: owner for key, hook in hooks.items() if (owner := _owner(hook)) is not None}
            if theirs:
                changed.append((hooks, dict(hooks)))
                hooks.update({key: cast(module, owner) for key, owner in theirs.items()})
    try:
        yield
    finally:
        for hooks, original in changed:
            hooks.clear()
            hooks.update(original)


def _owner(hook: Callable[..., Any]) -> Framework | None:
    """The framework that registered a hook; None for the user's own."""
    module = getattr(hook, "__module__", None) or ""
    return next((framework for framework in FRAMEWORKS if module.startswith(framework.hook_modules)), None)


def _input_cast(module: nn.Module, owner: Framework) -> Callable[..., Any]:
    dtype, _ = owner.hook_casts(module)
    return _nothing if dtype is None else lambda _module, args, kwargs: cast_floating((args, kwargs), dtype)


def _output_cast(module: nn.Module, owner: Framework) -> Callable[..., Any]:
    _, dtype = owner.hook_casts(module)
    return _nothing if dtype is None else lambda _module, _inputs, output: cast_floating(output, dtype)


def _nothing(*_: Any) -> None:
    return None
