"""Second derivatives of custom functions whose backward has none, by differences of the function itself.

[Note: by differences] Most fused attentions, norms and losses are functions of torch.autograd.Function around kernels
that autograd cannot see: their backward has no derivative. Let f have the inputs h and the Jacobian J(h), and the
backward b(g, h) = J(h)^T g. The second walk (walk.py) needs, for weights w at what b gives, the derivatives of
<w, b(g, h)> = <g, J(h) w>:

    along g    J(h) w                                    = (f(h + t w) - f(h - t w)) / 2t
    along h    the second derivative of <g, f> along w   = (b(g, h + t w) - b(g, h - t w)) / 2t

The second holds because second derivatives are symmetric. So a forward and a backward of the function at either side
give both, for all inputs together, and nothing needs to be known of what the function computes or saves. Of what it
saves beside its inputs (a logsumexp, a norm's scale) the second takes the part along the inputs as well. In a job that
holds where the function runs again on its stored inputs, as in a checkpoint; where it does not, such tensors are exact,
and then so are mostly the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd import Function

from .._patches import replaced
from ..distributed import whole_value
from ..hooks import GivenToFunction, given_to_functions, kept_exactly
from .autograd_graph import float32_parts
from .isolation import generators_restored
from .surroundings import Surroundings

_GIVEN, _TWICE, _WRITES = "_gact_dist_given", "_gact_dist_twice", "_gact_dist_writes"
"""attributes of a node: what its function was given, whether its backward is to be differentiated by differences, and
whether it has written over what it saved: nothing else would show that its graph reads other values now"""
_without_derivative: WeakSet[type] = WeakSet()
"""custom functions whose backward was found to have none"""


class _Given(NamedTuple):
    """What a custom function was given."""

    call: GivenToFunction
    surroundings: Surroundings


@contextmanager
def given_noted() -> Iterator[None]:
    """Within the context the nodes of custom functions note what these were given, which they then hold."""

    def note(node: Any, call: GivenToFunction) -> None:
        devices = [value.device.type for value in call.arguments if isinstance(value, Tensor)]
        setattr(node, _GIVEN, _Given(call, Surroundings([], devices)))
        node.apply = partial(_apply, ref(node))

    with given_to_functions(note):
        yield


def noted(nodes: Iterable[Any]) -> list[Any]:
    """Those of some nodes that can be differentiated in this way."""
    return [node for node in nodes if hasattr(node, _GIVEN)]


@contextmanager
def by_differences(nodes: Iterable[Any], run_again: bool = False) -> Iterator[None]:
    """Within the context the backward of functions that are known to have no derivative has one.

    nodes: of noted(). run_again: whether the job runs them once more in its backward, on what is stored of their
    inputs: then a derivative that autograd finds is not that of all which they save. See [Note: by differences].
    """
    with ExitStack() as stack:
        for node in nodes:
            if _function_of(node) in _without_derivative or (run_again and getattr(node, _GIVEN).call.computes):
                stack.enter_context(replaced(node, _TWICE, True))
        yield


def learn(nodes: Iterable[Any], opaque: Sequence[Any], error: BaseException | None) -> bool:
    """Whether functions turn out to have no derivative that were not known to have none.

    nodes: of noted(). opaque: those of all nodes whose results have no derivative. error: what a backward raised.
    """
    raised = set(_codes_of(error))
    new = set()
    for node in nodes:
        function: Any = _function_of(node)
        raises = getattr(unwrap(function.backward), "__code__", None) in raised
        if function not in _without_derivative and (raises or node in opaque or hasattr(node, _WRITES)):
            new.add(function)
    _without_derivative.update(new)
    return bool(new)


def _function_of(node: Any) -> type:
    return getattr(node, _GIVEN).call.function


def _codes_of(error: BaseException | None) -> Iterator[Any]:
    """The code that an error, or one that caused it, came through."""
    while error is not None:
        traceback = error.__traceback__
        while traceback is not None:
            yield traceback.tb_frame.f_code
            traceback = traceback.tb_next
        error = error.__cause__


class _Context:
    """What a backward sees of its node, with what it saved read once: a checkpoint refuses to be asked again."""

    def __init__(self, node: Any, saved: tuple[Any, ...]) -> None:
        self._node, self.saved_tensors = node, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _apply(weakly: ref[Any], *gradients: Tensor | None) -> Any:
    """What autograd calls for a node. Where a graph is cut nothing may enter, which its function never meets."""
    node: Any = weakly()
    if all(gradient is None for gradient in gradients):
        return (None,) * len(node.needs_input_grad)
    if hasattr(node, _TWICE):
        return _backward_of(node, *gradients)
    given: _Given = getattr(node, _GIVEN)
    saved = node.saved_tensors
    context = _context_of(node, given, saved)
    results = given.call.function.backward(context, *gradients)
    if torch.is_grad_enabled() and not all(
        torch.equal(saved[number], context.saved_tensors[number]) for number in given.call.saved.values()
    ):
        setattr(node, _WRITES, True)
    return results


def _backward_of(node: Any, *gradients: Tensor | None) -> Any:
    """The backward of a custom function, as a node that can be differentiated."""
    given: _Given = getattr(node, _GIVEN)
    saved = node.saved_tensors
    values = {
        place: saved[number].view(given.call.arguments[place].shape) for place, number in given.call.saved.items()
    }
    inputs = {place: value for place, value in values.items() if value.requires_grad}
    context = _context_of(node, given, tuple(map(_detached, saved)))
    with torch.no_grad():
        results = given.call.function.backward(context, *map(_detached, gradients))
    results = results if isinstance(results, tuple) else (results,)
    places = [place for place, result in enumerate(results) if isinstance(result, Tensor)]
    if not places:
        return results
    fixed = {place: value for place, value in values.items() if place not in inputs}
    twice = _Twice(given, places, len(gradients), list(inputs), fixed)
    made = iter(_Differentiable.apply(twice, [results[place] for place in places], *gradients, *inputs.values()))
    return tuple(next(made) if isinstance(result, Tensor) else result for result in results)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _context_of(node: Any, given: _Given, saved: tuple[Any, ...]) -> _Context:
    """What a backward is called with, which may write over what it saved: of its arguments, which others read, it has
    copies."""
    shared = {*given.call.saved.values()}
    return _Context(node, tuple(each.clone() if number in shared else each for number, each in enumerate(saved)))


class _Twice(NamedTuple):
    given: _Given
    places: list[int]
    """of the function's arguments, those whose gradients there are"""
    gradients: int
    """how many gradients enter its backward"""
    inputs: list[int]
    """of its arguments, those that it saved and that something was computed for"""
    fixed: dict[int, Tensor]
    """what it saved of the others"""

    def derivatives(
        self, weights: Sequence[Tensor | None], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Of <weights, what the backward gives>, along the gradients that enter it, then along the inputs it saved."""
        values = [*self.given.call.arguments]
        for place, value in self.fixed.items():
            values[place] = value
        for place, value in zip(self.inputs, inputs, strict=True):
            values[place] = value
        ways = {place: way for place, way in zip(self.places, weights, strict=True) if way is not None}
        step = step_along((values[place], way) for place, way in ways.items())
        if not ways or step == 0.0:
            return [None] * (len(gradients) + len(inputs))
        ahead, behind = (self._moved(values, ways, gradients, sign * step) for sign in (1.0, -1.0))
        return [
            None if one is None or other is None else ((one - other) / (2.0 * step)).to(one.dtype)
            for one, other in zip(ahead, behind, strict=True)
        ]

    def _moved(
        self, values: Sequence[Any], ways: dict[int, Tensor], gradients: Sequence[Tensor | None], step: float
    ) -> list[Tensor | None]:
        """The function's results, then its gradients at the inputs it saved, with its arguments moved along ways."""
        arguments = [*values]
        for place in {*self.places, *self.inputs}:
            value = arguments[place].detach()
            if place in ways:
                value = value + (step * ways[place]).to(value.dtype)
            arguments[place] = value.requires_grad_()
        with generators_restored(), self.given.surroundings.again(), kept_exactly(), torch.enable_grad():
            results = self.given.call.function.apply(*arguments)
            results = results if isinstance(results, tuple) else (results,)
            entered = [
                (result, gradient)
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and isinstance(result, Tensor) and result.requires_grad
            ]
            wanted = [arguments[place] for place in self.inputs]
            found: Sequence[Tensor | None] = [None] * len(wanted)
            if entered and wanted:
                heads, given = zip(*entered, strict=True)
                found = torch.autograd.grad(heads, wanted, given, allow_unused=True)
        moved = (
            None if gradient is None else _detached(result) for result, gradient in zip(results, gradients, strict=True)
        )
        return [*moved, *found]


def step_along(moved: Iterable[tuple[Tensor, Tensor]], in_low_precision: float = 0.02) -> float:
    """How far to go along ways, of (value, way): a hundredth of what is moved; 0 where nothing is moved.

    in_low_precision: the part that is used there instead, as differences have few digits. A collective call for
    distributed tensors.
    """
    ratios, low = [], False
    for value, way in moved:
        low |= value.dtype in (torch.bfloat16, torch.float16)
        size, along = (whole_value(float32_parts(part).norm()) for part in (value, way))
        if along > 0.0 and size > 0.0:
            ratios.append(size / along)
    return (in_low_precision if low else 0.01) * min(ratios, default=0.0)


class _Differentiable(Function):
    """What a backward has given, with the derivatives of [Note: by differences]."""

    @staticmethod
    def forward(ctx: Any, twice: _Twice, results: list[Tensor], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.twice = twice
        ctx.save_for_backward(*tensors)
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor | None) -> tuple[Any, ...]:
        count, tensors = ctx.twice.gradients, ctx.saved_tensors
        with torch.no_grad():
            found = ctx.twice.derivatives(weights, tensors[:count], tensors[count:])
        return None, None, *found
