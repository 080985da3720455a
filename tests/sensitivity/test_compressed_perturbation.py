"""A block that keeps most of what the model keeps, on a batch that cannot be divided: no tensor is held exactly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from test_peak_of_adaptation import peak_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import Paused, Sensitivity, compressed_perturbation, measure, one_pass
from gact_dist.sensitivity.inner_backward import Reruns

Batch = tuple[Tensor, Tensor, Tensor]


class Messages(nn.Module):
    """Features [nodes, width] -> [nodes, width]: what a small network makes of them is sent along edges."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.linear(x)
        messages = x[edges[0]]
        for layer in (self.first, self.second, self.third):
            messages = layer(messages).tanh().add(messages)
        return torch.zeros_like(x).index_add(0, edges[1], messages)


class Graph(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.messages, self.head = Messages(width), nn.Linear(width, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.head(self.messages(x, edges).relu())


def graph_job(nodes: int = 256, seed: int = 0) -> tuple[Graph, Batch]:
    """Eight edges for a node."""
    torch.manual_seed(seed)
    model = Graph()
    return model, (torch.randn(nodes, 32), torch.randint(nodes, (2, 8 * nodes)), torch.randint(5, (nodes,)))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(*batch[:2]), batch[2])


def measured(model: nn.Module, batch: Batch, hooks: SavedTensorHooks, **options: int) -> list[Sensitivity] | Paused:
    return measure(hooks, model, lambda: loss_of(model, batch), probes=4, **{"seed": 1, **options})


def test_its_estimates_are_the_variance_that_each_tensor_adds(monkeypatch):
    """Over 20 measurements, beside 40 gradients with one tensor rounded and the others exact; nothing is derived."""
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 0)
    model, batch = graph_job()
    hooks = SavedTensorHooks(model, Config(min_numel=0, bits=8, derive=False), 0)
    found: dict[str, Tensor] = {}
    for seed in range(20):
        for item in measured(model, batch, hooks, seed=1000 * seed):
            assert item.by_perturbation
            found[item.name] = found.get(item.name, 0.0) + item.variance / 20
    reruns = Reruns(hooks, model, lambda: loss_of(model, batch), 1.0)
    exact = reruns.gradients({})
    matters = {name: variance for name, variance in found.items() if variance[7] > 1e-12}
    for bits in (8, 5):
        for name, variance in matters.items():
            true = 0.0
            for seed in range(40):
                pairs = zip(reruns.gradients({name: (bits, seed)}), exact, strict=True)
                true += sum(float((a - b).square().sum()) for a, b in pairs) / 40
            assert abs(float(variance[bits - 1]) / true - 1) < 0.2, (name, bits)
    hooks.close()
    assert len(matters) >= 5


def test_the_estimates_are_near_those_of_the_one_pass(monkeypatch):
    model, batch = graph_job()
    hooks = SavedTensorHooks(model, Config(min_numel=0, bits=4, derive=False), 0)
    by_pass = {item.name: float(item.variance[3]) for item in measured(model, batch, hooks)}
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 0)
    totals = dict.fromkeys(by_pass, 0.0)
    for seed in range(10):
        for item in measured(model, batch, hooks, seed=1000 * seed):
            totals[item.name] += float(item.variance[3]) / 10
    hooks.close()
    assert by_pass
    assert all(0.6 < totals[name] / variance < 1.6 for name, variance in by_pass.items() if variance > 1e-9)


def test_only_a_large_block_of_few_tensors_on_a_whole_batch_is_measured_so(monkeypatch):
    def by_perturbation(**options: float) -> bool:
        model, batch = graph_job()
        hooks = SavedTensorHooks(model, Config(min_numel=0, bits=4), 0)
        found = measured(model, batch, hooks, **options)
        hooks.close()
        return all(item.by_perturbation for item in found)

    assert not by_perturbation()  # all that it keeps is small
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 0)
    assert by_perturbation()
    assert not by_perturbation(fraction=0.25)  # the job keeps four times as much
    monkeypatch.setattr(one_pass, "_MOST_TENSORS", 4)
    assert not by_perturbation()


def test_a_few_tensors_are_measured_in_a_step(monkeypatch):
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 0)
    model, batch = graph_job()
    hooks = SavedTensorHooks(model, Config(min_numel=0, bits=4), 0)
    at_once = measured(model, batch, hooks)
    found, steps = measured(model, batch, hooks, shares=2), 1
    while isinstance(found, Paused):
        found, steps = found.resume(lambda: loss_of(model, batch)), steps + 1
    hooks.close()
    assert [item.name for item in found] == [item.name for item in at_once]
    assert steps == -(-len(found) // compressed_perturbation._A_STEP) > 2
    # nothing has changed in between
    assert all(torch.equal(one.variance, other.variance) for one, other in zip(found, at_once, strict=True))


def test_no_step_holds_what_the_untouched_job_does(monkeypatch):
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 1 << 20)
    model, batch = graph_job(nodes=2048)

    def untouched() -> None:
        loss_of(model, batch).backward()
        model.zero_grad()

    untouched()
    before = peak_of(untouched)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=0, noise_limit=0, adapt_interval=100))

    def compressed() -> None:
        with gact.step(lambda part: loss_of(model, part), batch):
            loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad()

    steps = []
    while not gact.history:
        steps.append(peak_of(compressed))
        assert len(steps) < 20
    later = max(peak_of(compressed) for _ in range(2))
    assert len(steps) > 2
    assert max(steps) < before
    assert max(steps[2:]) < 1.2 * later  # two forwards show how large the block is
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 1 << 30)
    assert peak_of(lambda: gact.calibrate(lambda part: loss_of(model, part), batch)) > before
    gact.detach()


class Held:
    """A batch that no one can look into, as that of a library of graphs."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


def test_a_batch_that_cannot_be_kept_is_measured_in_as_many_steps(monkeypatch):
    monkeypatch.setattr(one_pass, "_LEAST_BYTES", 1 << 20)

    def steps_of(wrapped: bool) -> int:
        model, batch = graph_job(nodes=2048)
        gact = gact_dist.attach(model, config=Config(bits=4, min_numel=0))
        given = Held(batch) if wrapped else batch
        steps = 0
        while not gact.history:
            with gact.step(lambda part: loss_of(model, part.batch if wrapped else part), given):
                loss = loss_of(model, batch)
            loss.backward()
            steps += 1
        assert all(entry is not None for entry in gact.plan.values())
        gact.detach()
        return steps

    assert steps_of(wrapped=True) == steps_of(wrapped=False) > 4


def adapted_on_ranks() -> tuple[dict, int]:
    """Rank 1 has a graph of a quarter of the nodes, which the one pass measures."""
    one_pass._LEAST_BYTES = 1 << 20
    try:
        model, batch = graph_job(nodes=2048 if dist.get_rank() == 0 else 512)
        ddp = DistributedDataParallel(model)
        gact = gact_dist.attach(ddp, config=Config(bits=4, min_numel=0))
        for step in range(20):
            with gact.step(lambda part: loss_of(ddp, part), batch):
                loss = loss_of(ddp, batch)
            loss.backward()
            model.zero_grad()
            if gact.history:
                return gact.plan, step
        return {}, 0
    finally:
        one_pass._LEAST_BYTES = 32 << 20


def test_ranks_that_measure_in_different_ways_hold_one_plan(ranks):
    (plan, steps), (other_plan, other_steps) = ranks(adapted_on_ranks)
    assert plan == other_plan != {}
    assert steps == other_steps
