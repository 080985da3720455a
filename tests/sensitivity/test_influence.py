"""Perturbation: tensors that move different parameters share a backward, with the numbers that each has alone."""

from __future__ import annotations

from collections import Counter

import pytest
import small_models
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from unseen import Unseen

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import influence
from gact_dist.sensitivity.one_pass import measure


def alone(moved):
    """Every tensor in a group of its own, as if all moved the same parameters."""
    return [[record] for record in moved]


def measured(monkeypatch, model, batch, loss_fn=None, apart=False):
    """({name: variance}, backwards that it took)."""
    loss_fn = loss_fn or small_models.loss_of(model)
    run, backwards = torch.autograd._engine_run_backward, []

    def counted(*arguments, **options):
        backwards.append(1)
        return run(*arguments, **options)

    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", counted)
        if apart:
            patch.setattr("gact_dist.sensitivity.perturbation.disjoint", alone)
        found = measure(hooks, model, lambda: loss_fn(batch), seed=3, estimator="perturbation")
    hooks.close()
    return {item.name: item.variance for item in found}, len(backwards)


class Attention(nn.Module):
    """Attention over the neighbours of a graph's nodes, as GAT has it, on a dense adjacency."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.values, self.head = nn.Linear(32, 64), nn.Linear(64, 10)
        self.sends, self.receives = nn.Linear(64, 1), nn.Linear(64, 1)

    def forward(self, x):
        values = self.values(x)
        scores = nn.functional.leaky_relu(self.sends(values) + self.receives(values).T, 0.2)
        return self.head(nn.functional.elu(scores.softmax(-1) @ values))


def attention():
    return Attention(), (torch.randn(48, 32), torch.randint(0, 10, (48,)))


@pytest.mark.parametrize(
    ("kind", "tensors", "backwards"), [("mlp", 5, 4), ("gpt", 22, 16), ("cnn", 6, 3), ("attention", 4, 4)]
)
def test_shared_backwards_are_fewer_and_give_the_same_numbers(monkeypatch, kind, tensors, backwards):
    model, batch = attention() if kind == "attention" else getattr(small_models, kind)()
    groups, moved, ran = [], {}, Unseen(Counter())

    def noted(found):
        moved.update(found)
        groups.extend(influence.disjoint(found))
        return groups

    monkeypatch.setattr("gact_dist.sensitivity.perturbation.disjoint", noted)
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.value.update([name]))
    shared, taken = measured(monkeypatch, model, batch)
    assert set(ran.value.values()) == {1}  # of the one forward; backwards are those of its graph
    apart, as_many_as_tensors = measured(monkeypatch, model, batch, apart=True)
    # one backward for all, and those of the parameter that most tensors move, each of which needs one of its own
    most = max(sum(leaves >> k & 1 for leaves in moved.values()) for k in range(len(list(model.parameters()))))
    assert taken == backwards == 1 + len(groups) == 1 + most
    assert as_many_as_tensors == 1 + tensors
    assert shared.keys() == apart.keys()
    assert all(torch.equal(shared[name], apart[name]) for name in shared)
    assert any(bool(variance.any()) for variance in shared.values())


def test_the_inputs_of_linears_share_one_backward(monkeypatch):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    batch = (torch.randn(64, 32), torch.randint(0, 32, (64,)))
    found, backwards = measured(monkeypatch, model, batch)
    assert (len(found), backwards) == (5, 2)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x).tanh(), use_reentrant=False))


def test_the_input_of_a_checkpoint_moves_all_of_its_block(monkeypatch):
    model, batch = Checkpointed(), (torch.randn(64, 32), torch.randint(0, 10, (64,)))
    shared, _ = measured(monkeypatch, model, batch)
    apart, _ = measured(monkeypatch, model, batch, apart=True)
    assert sum(bool(variance.any()) for variance in shared.values()) == 3  # of the block, of the last linear, of tanh
    assert all(torch.equal(shared[name], apart[name]) for name in shared)


def test_groups_hold_what_moves_different_parameters():
    records = list("abcde")
    groups = influence.disjoint(dict(zip(records, (0b001, 0b010, 0b011, 0b100, 0), strict=True)))
    assert groups == [["a", "b", "d"], ["c"]]
