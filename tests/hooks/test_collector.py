"""Python's garbage collector rests while a forward is compressed, and is as it was before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gact_dist

LAYERS = 200


class Model(nn.Module):
    """Notes whether the collector is on; raises on demand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.seen: list[bool] = []
        self.error: Exception | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(gc.isenabled())
        for layer in self.layers:
            x = layer(x).tanh()
        if self.error is not None:
            raise self.error
        return x


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()


def stepping(model: Model, gact: gact_dist.Controller, how: str) -> Callable[[], Tensor]:
    batch = torch.randn(32, 64)
    if how == "follow":
        gact.follow()
        return lambda: model(batch).sum()

    def step() -> Tensor:
        with gact.step():
            return model(batch).sum()

    return step


@pytest.mark.parametrize("how", ["step", "follow"])
@pytest.mark.parametrize("before", [True, False])
def test_it_rests_in_the_forward_alone_and_stays_off_where_it_was(how, before):
    model = Model()
    gact = gact_dist.attach(model, "L1")
    step = stepping(model, gact, how)
    if not before:
        gc.disable()
    for _ in range(3):
        loss = step()
        assert gc.isenabled() is before
        loss.backward()
    assert model.seen == [False] * 3
    gact.detach()
    model(torch.randn(32, 64))
    assert model.seen[-1] is before


@pytest.mark.parametrize("how", ["step", "follow"])
def test_a_forward_that_raises_leaves_it_on(how):
    model = Model()
    step = stepping(model, gact_dist.attach(model, "L1"), how)
    step().backward()
    model.error = RuntimeError("the model's own")
    with pytest.raises(RuntimeError, match="the model's own"):
        step()
    assert gc.isenabled()
    model.error = None
    step().backward()
    assert gc.isenabled()


def test_a_step_wakes_it_once_and_not_for_every_few_layers():
    model = Model()
    step, runs = stepping(model, gact_dist.attach(model, "L1"), "step"), [0]
    for _ in range(3):
        step().backward()

    def count(phase: str, _: dict) -> None:
        runs[0] += phase == "start"

    gc.collect()
    gc.callbacks.append(count)
    try:
        for _ in range(20):
            step().backward()
    finally:
        gc.callbacks.remove(count)
    # one may be due at the end of each forward; each tenth is of the next generation, in place of one of these
    assert runs[0] <= 20 + 2
