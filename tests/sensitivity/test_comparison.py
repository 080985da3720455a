"""The gradient under a plan beside the exact one, block by block, against gradients of whole forwards."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import small_models
import torch
from small_models import TinyGPT
from test_second_moment import DRAW, JOBS, Measured, seeded
from torch import Tensor, nn
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef

from gact_dist import Config
from gact_dist.hooks import OperatorObserver, SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import Comparison, ExamplesRefusedError, Observation, ProbeBatch, compared
from gact_dist.sensitivity.rounded_walk import GradientComparison, RoundedWalk, squared_distance


def comparison(job: Measured, plan: Plan | None = None, **options: Any) -> Comparison:
    torch.manual_seed(1)
    return compared(job.hooks, job.model, job.loss, job.hooks.plan if plan is None else plan, draw=DRAW, **options)


def of_whole_gradients(job: Measured, plan: Plan) -> tuple[float, float]:
    """(error, square) of gradients as a step has them, each from a forward and backward of its own."""
    gradients = []
    for stored_by in (None, plan):
        torch.manual_seed(1)
        job.model.zero_grad()
        if stored_by is None:
            loss = job.loss()
        else:
            with job.hooks.rehearsal(stored_by, draw=DRAW):
                loss = job.loss()
        loss.backward()
        gradients.append(small_models.gradient(job.model).double())
    exact, rounded = gradients
    return float((rounded - exact).square().sum()), float(exact.square().sum())


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("name", JOBS)
def test_error_and_square_are_those_of_whole_gradients_with_the_same_random_numbers(name, bits, visited):
    job = Measured(JOBS[name], bits)
    found = comparison(job)
    assert len(visited) >= 2 * 2  # every block once for each gradient
    error, square = of_whole_gradients(job, job.hooks.plan)
    # sums of float32 in another order, as for the moments; at 8 bits the difference is a hundredth of the gradient
    assert found.error == pytest.approx(error, rel=1e-3)
    assert found.square == pytest.approx(square, rel=1e-5)


@pytest.mark.parametrize("name", JOBS)
def test_with_nothing_rounded_the_two_gradients_are_the_same(name):
    found = comparison(Measured(JOBS[name], 4), Plan())
    assert (found.error, found.rounded) == (0.0, ())
    assert found.square > 0.0


def test_a_model_without_blocks_is_compared_in_whole_forwards(visited):
    job = Measured((small_models.mlp, ()), 4)
    found = comparison(job)
    assert not visited
    error, square = of_whole_gradients(job, job.hooks.plan)
    assert (found.error, found.square) == (pytest.approx(error, rel=1e-5), pytest.approx(square, rel=1e-5))
    assert found.rounded


def test_a_compiled_model_is_compared_in_whole_forwards(visited):
    torch.manual_seed(0)
    model, batch = small_models.gpt(layers=1)
    model.compile(backend="aot_eager")
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=64), 0)
    loss_fn = small_models.loss_of(model)
    found = compared(hooks, model, lambda: loss_fn(batch), hooks.plan, draw=DRAW)
    assert not visited
    assert 0.0 < found.error < found.square
    assert found.rounded


@pytest.mark.parametrize("name", ["gpt", "mlp without blocks"])
def test_a_part_of_the_examples_is_rounded_as_the_whole_is(name):
    """Its tensors are smaller, and min_numel refers to those of a step."""
    model, batch = small_models.gpt() if name == "gpt" else small_models.mlp()
    rows = len(batch[0])
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=4096), 0)
    loss_fn = small_models.loss_of(model)
    for _ in range(2):
        with hooks.recording(OperatorObserver()):
            loss_fn(batch)
    whole = compared(hooks, model, lambda: loss_fn(batch), hooks.plan, draw=DRAW)
    part = tuple(tensor[: rows // 4] for tensor in batch)
    found = compared(hooks, model, lambda: loss_fn(part), hooks.plan, draw=DRAW, fraction=0.25)
    assert set(found.rounded) == set(whole.rounded) != set()
    assert found.error > 0.0


def test_only_what_the_plan_rounds_is_named():
    job = Measured(JOBS["gpt"], 4)
    names = comparison(job).rounded
    exact = names[0]
    assert set(comparison(job, job.hooks.plan.updated({exact: None})).rounded) == set(names) - {exact}


class Reciprocal(torch.autograd.Function):
    """Passes x on; the backward divides by what was saved of another tensor, and multiplies by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: Tensor) -> Tensor:
        ctx.kept = divisor.detach()
        ctx.save_for_backward(divisor)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.kept / ctx.saved_tensors[0], None


class Dividing(nn.Module):
    """Two parts; between them a division by numbers of which every group of 128 has one of 1e-30 and one of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        divisor = torch.exp(-35.0 * (torch.arange(64) % 3) / 2.0 + 0.0 * x)
        return self.parts[1](Reciprocal.apply(x, 1.0 * divisor)).square().mean()


def dividing(scale: float = 1.0) -> Comparison:
    torch.manual_seed(0)
    model, x = Dividing(), torch.randn(64, 64)
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=64), 0)
    for _ in range(2):
        with hooks.recording(OperatorObserver()):
            model(x)
    return compared(hooks, model, lambda: model(x) * scale, hooks.plan, draw=DRAW)


def test_a_gradient_that_rounding_makes_useless_is_seen_and_the_exact_one_is_not_touched():
    found = dividing()
    assert found.exact_is_finite
    assert not found.error < 1e6 * found.square  # infinite where a divisor is rounded to zero


def test_an_exact_gradient_that_is_not_finite_is_told_apart():
    assert not dividing(math.inf).exact_is_finite


def test_a_finite_gradient_whose_square_no_float32_can_hold_is_finite():
    found = GradientComparison(Counter({"a": 1}), 2)
    for number in range(2):
        found.add("a", number, torch.full((3,), 1e30 * (1 + number)))
    found.leave(["a"])
    assert found.result() == (pytest.approx(3e60, rel=1e-5), pytest.approx(3e60, rel=1e-5))


def test_parts_of_one_gradient_are_summed_before_they_are_compared():
    exact, *others = gradients = [torch.randn(7) for _ in range(3)]
    found = GradientComparison(Counter({"a": 2, "b": 1}), len(gradients))
    for number, gradient in enumerate(gradients):
        found.add("a", number, gradient / 4)
        found.add("b", number, 2 * gradient)
    found.leave(["a", "b"])
    for number, gradient in enumerate(gradients):
        found.add("a", number, gradient * 3 / 4)
    found.leave(["a"])
    error = 5 * sum(float((other - exact).square().sum()) for other in others) / 2
    assert found.result() == (pytest.approx(error, rel=1e-5), pytest.approx(5 * float(exact.square().sum()), rel=1e-5))


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (1500, 1500), (3, 2_000_000), (2_000_000, 3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_distance_in_slices_is_that_of_the_whole(shape, transposed):
    a, b = torch.randn(shape), torch.randn(shape)
    if transposed and a.dim() == 2:
        a, b = a.T.contiguous().T, b.clone()
    assert squared_distance(a) == pytest.approx(float(a.double().square().sum()), rel=1e-12)
    assert squared_distance(a, b) == pytest.approx(float((a - b).double().square().sum()), rel=1e-12)


class Last(Function):
    """The identity, whose backward counts which storages are alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[StorageWeakRef], alive: list[int]) -> Tensor:
        ctx.made, ctx.alive = made, alive
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.alive.append(sum(not storage.expired() for storage in ctx.made))
        return gradients[0], None, None


class Chain(nn.Module):
    """Ten operators in a row, each of which saves its result."""

    def __init__(self, alive: Callable[[], list[int]]) -> None:
        super().__init__()
        self.linear, self.alive = nn.Linear(8, 8), alive

    def forward(self, x: Tensor) -> Tensor:
        made: list[StorageWeakRef] = []
        x = Last.apply(self.linear(x), made, self.alive())
        for _ in range(10):
            x = x.tanh()
            made.append(StorageWeakRef(x.untyped_storage()))
        return x


def test_what_a_block_saves_is_freed_as_its_backward_goes_on(visited):
    alive: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Chain(lambda: alive), nn.Linear(8, 8)) for _ in range(2))
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight.tanh()
            for block in self.blocks:
                x = block(x @ weight)
            return x.square().mean()

    torch.manual_seed(0)
    model = Model()
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16), 0)
    x = torch.randn(16, 8)
    found = compared(hooks, model, lambda: model(x), Plan(default=4), draw=DRAW)
    assert len(visited) == 4
    assert max(alive) <= 1
    assert 0.0 < found.error < found.square


class Noting(nn.Module):
    """A block in whose backward the storage of its input is alive, or not."""

    def __init__(self, noted: Callable[[], tuple[list[StorageWeakRef], list[int]]]) -> None:
        super().__init__()
        self.linear, self.noted = nn.Linear(8, 8), noted

    def forward(self, x: Tensor) -> Tensor:
        return Last.apply(self.linear(x).tanh(), *self.noted())


def test_while_it_goes_on_the_graph_alone_holds_what_was_saved_between_blocks(monkeypatch):
    class Outside(TinyGPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = torch.tanh(self.embedding(tokens))
            for block in self.blocks:
                x = torch.tanh(block(x)) * x
            return self.head(self.norm(x))

    records: list[Any] = []

    class Walk(RoundedWalk):
        def __init__(self, forward: Any, draws: Any) -> None:
            records.extend(weakref.ref(item.record) for item in forward.between if item.first in forward.numbers)
            super().__init__(forward, draws)

        def comparison(self, pieces: Any) -> tuple[float, float]:
            gc.collect()
            assert records
            assert [record() for record in records if record() is not None] == []
            return super().comparison(pieces)

    monkeypatch.setattr("gact_dist.sensitivity.comparison.RoundedWalk", Walk)
    assert comparison(Measured((lambda: seeded(Outside), ()), 4)).rounded


def test_the_last_pass_through_a_block_does_not_hold_its_input(visited):
    """The exact pass comes first and has to; where the rounded one then needs more, it has that much less."""
    made: list[StorageWeakRef] = []
    alive: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Noting(lambda: (made, alive)), nn.Sequential(nn.Linear(8, 8))])

        def forward(self, x: Tensor) -> Tensor:
            x = 2 * x  # has no graph: it is handed to the block as it is
            made[:] = [StorageWeakRef(x.untyped_storage())]
            return self.blocks[1](self.blocks[0](x)).square().mean()

    model = Model()
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16), 0)
    x = torch.randn(16, 8)
    compared(hooks, model, lambda: model(x), Plan(default=4), draw=DRAW)
    assert len(visited) == 4
    assert alive == [1, 0]


def test_what_blocks_share_of_a_graph_serves_all_of_them():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.norm(self.linear(x) * scale).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scaled() for _ in range(3))
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.weight.exp()
            for block in self.blocks:
                x = block(x, scale)
            return (x * scale).square().mean()

    torch.manual_seed(0)
    model = Model()
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, min_numel=16), 0)
    x = torch.randn(16, 8)
    found = compared(hooks, model, lambda: model(x), Plan(default=4), draw=DRAW)
    model(x).backward()
    assert found.square == pytest.approx(float(small_models.gradient(model).double().square().sum()), rel=1e-5)


# -- which examples ---------------------------------------------------------------------------------------------


def accepted(batch: ProbeBatch, parts: int) -> float:
    """The fraction of the first beginning that the loss function accepts."""
    for part in batch.beginnings(parts):
        with suppress(ExamplesRefusedError):
            part.forward()
            return part.fraction
    raise AssertionError("the last is all that there is")


@pytest.mark.parametrize(
    ("rows", "finer", "expected"), [(64, 1, 16), (64, 4, 4), (6, 1, 2), (3, 1, 3), (2, 8, 2), (1, 1, 1)]
)
def test_a_quarter_of_the_batch_is_compared_or_two_examples_whatever_is_measured(rows, finer, expected):
    seen: list[int] = []
    batch = ProbeBatch(lambda given: seen.append(len(given)), torch.zeros(rows, 5), 8)
    fraction = accepted(batch, 4 * finer)
    assert seen == [expected]
    assert fraction == expected / rows


def test_a_loss_function_that_refuses_so_few_examples_gets_more():
    seen: list[int] = []

    def loss_fn(given: Tensor) -> None:
        if len(given) < 30:
            raise ValueError("too few")
        seen.append(len(given))

    assert accepted(ProbeBatch(loss_fn, torch.zeros(64, 3), 8), 4) == 0.5
    assert accepted(ProbeBatch(loss_fn, torch.zeros(31, 3), 8), 4) == 1.0
    assert seen == [32, 31]


def test_what_has_no_examples_is_compared_whole():
    assert accepted(ProbeBatch(lambda _: None, None), 4) == 1.0


@pytest.mark.parametrize(("observed", "expected"), [(8, 8), (32, 16), (64, 16)])
def test_an_observation_has_as_many_examples_as_were_kept_and_no_more_than_a_quarter(observed, expected):
    model = nn.Linear(3, 2)
    x = torch.randn(64, 3)
    observation = Observation(((x,), {}), observed)
    outputs = model(x)
    observation.outputs(outputs)
    outputs.square().mean().backward()
    seen: list[int] = []
    batch = ProbeBatch(lambda given: seen.append(len(given.inputs[0][0])), observation, 8)
    assert accepted(batch, 4) == expected / 64
    assert seen == [expected]
