"""Activations that are written in many operators: all that they save is made from one tensor, each long chain once."""

from __future__ import annotations

import math

import pytest
import torch
from derived_jobs import TOKENS, WIDTH, Job, Lambda, check_made_again, distance
from live_storages import derived_peak
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gact_dist.hooks import derived


def gelu_new(x):
    """As GPT-2 has it in transformers."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


# by operator: what stands between two linear layers, and how many tensors are derived
OPERATORS = {"gelu_new": (gelu_new, 4), "gelu_fast": (gelu_fast, 7)}


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_that_it_saves_is_made_from_one_tensor(operator):
    function, count = OPERATORS[operator]
    job = Job(Lambda(function))
    check_made_again(job, count, 1e-3)
    assert len([row for row in job.rows("quantised") if row.name.startswith("1:")]) == 1


def test_low_precision():
    job = Job(Lambda(gelu_new))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.gradient()
        job.gradient()
        assert len(job.rows("derived")) == 4
        assert distance(job.gradient([row.name for row in job.rows("quantised")]), job.untouched()) < 2**-6


class Count(TorchDispatchMode):
    """Of elements that an operator is called for."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names, self.numel = names, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in self._names:
            self.numel += args[0].numel()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backwards", [1, 2])
def test_what_tanh_saves_is_made_once_in_a_backward(backwards):
    """For four that read it, and again in another backward."""
    job = Job(Lambda(gelu_new))
    job.gradient()
    job.gradient()
    with job.gact.step():
        loss = job.model(job.x).square().mean()
    found = []
    with Count("aten::tanh", "aten::tanh_") as count:
        for number in range(backwards):
            kept = number + 1 < backwards
            found.append(torch.autograd.grad(loss, job.model.parameters(), retain_graph=kept))
    assert count.numel == backwards * TOKENS * WIDTH
    assert all(map(torch.equal, found[0], found[-1]))


def test_nothing_of_a_backward_stays():
    """What is kept for tanh's own backward is gone with it."""
    job = Job(Lambda(gelu_new))
    job.gradient()
    job.gradient()
    with job.gact.step():
        loss = job.model(job.x).square().mean()
    made = _shared(loss.grad_fn)
    torch.autograd.grad(loss, job.model.parameters(), retain_graph=True)
    assert len(made) == 1
    assert all(expression._made is None for expression in made)


def _shared(root) -> list[derived.Shared]:
    """Long chains of a graph."""
    found, pending, seen = [], [root], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        handle = getattr(getattr(node, "_raw_saved_result", None), "data", None)
        expression = getattr(getattr(handle, "payload", None), "expression", None)
        found += [expression] if isinstance(expression, derived.Shared) else []
        pending += [below for below, _ in node.next_functions]
    return found


def test_a_power_that_is_no_whole_number_is_stored():
    job = Job(Lambda(lambda x: torch.sigmoid(x) * x + torch.pow(torch.sigmoid(x), 2.5)))
    job.gradient()
    job.gradient()
    assert all("Pow" not in row.name for row in job.rows("derived"))


def test_a_chain_that_takes_too_much_work_is_stored():
    def chain(x: Tensor) -> Tensor:
        y = torch.pow(x, 2.0)
        for _ in range(7):
            y = torch.add(x, y, alpha=0.1)
        return torch.tanh(y)

    job = Job(Lambda(chain))
    job.gradient()
    job.gradient()
    assert not job.rows("derived")


def test_a_chain_of_two_tensors_is_as_short_as_ever():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            other = self.other(x)
            saved = x.square() * other.square()
            return torch.tanh(0.5 * (x + 0.1 * (other + 0.1 * (x + 0.1 * torch.pow(other, 2.0))))) + saved

    job = Job(Two())
    job.gradient()
    job.gradient()
    assert not [row for row in job.rows("derived") if ":Tanh" in row.name]


def test_the_peak_of_a_step_is_no_higher(monkeypatch):
    """Than where tanh's result is stored, at the same bits: what is made again is kept for no longer than that would
    be there decoded."""

    def peak():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(256, 1024), Lambda(gelu_new), nn.Linear(1024, 256)) for _ in range(4)]
        model, x = nn.Sequential(*layers), torch.randn(1024, 256)
        return derived_peak(model, x)

    ours = peak()
    monkeypatch.setattr(derived, "_MOST_WORK", 6)
    stored = 4 * 1024 * 1024 // 2  # what tanh saves at 4 bits
    assert ours < peak() - 3 / 4 * stored
