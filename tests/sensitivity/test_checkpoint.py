"""What is replaced in torch while checkpoints are measured is there for as long, and no longer."""

from __future__ import annotations

import sys
import types
from functools import partial

import pytest
import small_models
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import rounded_moments
from gact_dist.sensitivity.one_pass import measure

DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


def keep_products(_, operator, *args, **kwargs):
    kept = operator == torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Blocks(nn.Module):
    """A block under a checkpoint of each kind; look() is called in each of their forwards."""

    def __init__(self, look):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.look = nn.Linear(32, 64), nn.Linear(64, 10), look
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def run(self, block, x):
        self.look()
        return torch.tanh(block(x))

    def forward(self, x):
        x = self.first(x)
        selective = {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}
        for block, options in zip(self.blocks, ({"use_reentrant": True}, {}, selective), strict=True):
            x = checkpoint(self.run, block, x, **{"use_reentrant": False, **options})
        return self.last(x)


def state_of_torch():
    """Everything in torch's checkpoint module and its classes, and what DeepSpeed has in place of one."""
    found = dict(vars(torch_checkpoint))
    classes = [item for item in found.values() if isinstance(item, type)] + [sys.modules[DEEPSPEED].CheckpointFunction]
    return found, {(item, name): value for item in classes for name, value in vars(item).items()}


def same(first, second):
    return all(
        one.keys() == other.keys() and all(one[key] is other[key] for key in one)
        for one, other in zip(first, second, strict=True)
    )


class Interrupted(BaseException):
    pass


@pytest.fixture
def deepspeed(monkeypatch):
    """Its module, as far as measuring looks at it."""
    module = types.ModuleType(DEEPSPEED)
    own = {"forward": staticmethod(lambda ctx, *tensors: tensors)}
    module.CheckpointFunction = type("CheckpointFunction", (torch.autograd.Function,), own)
    monkeypatch.setitem(sys.modules, DEEPSPEED, module)


@pytest.mark.parametrize("raised_in", ["nothing", "a forward", "a recomputation", "a loss that is no scalar"])
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_is_as_before_once_a_measurement_ends(raised_in, compiled, deepspeed):
    Blocks(lambda: None)(torch.randn(16, 32)).sum().backward()  # torch keeps what it finds out of the device
    before, seen = state_of_torch(), []

    def look():
        seen.append(same(before, state_of_torch()))
        if raised_in == "a forward" or (raised_in == "a recomputation" and torch._C._current_graph_task_id() != -1):
            raise Interrupted

    model = Blocks(look)
    if compiled:
        model.last.compile(backend="eager")
    batch, loss_fn = (torch.randn(16, 32), torch.randint(0, 10, (16,))), small_models.loss_of(model)
    if raised_in == "a loss that is no scalar":

        def loss_fn(batch):
            return model(batch[0])

    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    for run in (partial(measure, seed=1), partial(rounded_moments, passes=2, draw=0)):
        if raised_in == "nothing":
            assert run(hooks, model, lambda: loss_fn(batch))
        else:
            with pytest.raises(ValueError if raised_in.endswith("scalar") else Interrupted):
                run(hooks, model, lambda: loss_fn(batch))
        assert same(before, state_of_torch())
        assert seen
        assert not any(seen)  # so the comparison sees what is replaced
        seen.clear()
    hooks.close()
