"""Tensors that checkpoints make their blocks again from, where the derivative of an operator in these jumps; [Note:
jumps] in perturbation.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import one_pass
from gact_dist.sensitivity.one_pass import Sensitivity, measure
from gact_dist.sensitivity.partition import blocks_of

CHANNELS, BITS, DRAWS = 16, 6, 32


class Twice(torch.autograd.Function):
    """Its backward cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * grad


class Block(nn.Module):
    def __init__(self, operator: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.operator = operator

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.first(x)
        if self.operator == "max-pool":
            y = F.interpolate(F.max_pool2d(y, 2), scale_factor=2)
        y = self.second(F.gelu(y) if self.operator == "gelu" else F.relu(y))
        if self.operator == "opaque":
            y = Twice.apply(y)
        return x + y if skip is None else x + y * torch.sigmoid(skip)


class Inside(nn.Module):
    """A block with a checkpoint inside."""

    def __init__(self, block: nn.Module, alias: bool) -> None:
        super().__init__()
        self.block, self.scale, self.alias = block, nn.Conv2d(CHANNELS, CHANNELS, 1), alias

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(x)
        return checkpoint(self.block, torch.tanh(x) if self.alias else x, use_reentrant=False)


class Net(nn.Module):
    """wiring: of three blocks. alias: whether an operator outside of a checkpoint saves what that is given as well."""

    def __init__(self, operator: str, wiring: str = "", alias: bool = False) -> None:
        super().__init__()
        self.wiring, self.alias = wiring, alias
        self.stem, self.head = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Linear(CHANNELS, 5)
        blocks = [Block(operator) for _ in range(3)]
        self.blocks = nn.ModuleList(Inside(block, alias) if wiring == "inside" else block for block in blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        for block in self.blocks:
            if self.wiring == "inside":
                x = block(x)
                continue
            x = torch.tanh(x) if self.alias else x
            also = [first] if self.wiring == "skip" else []  # which all of them read
            x = checkpoint(block, x, *also, use_reentrant=self.wiring == "reentrant")
        return self.head(x.mean((2, 3)))


class Job:
    def __init__(self, model: nn.Module) -> None:
        torch.manual_seed(0)
        self.model, self.parameters = model, list(model.parameters())
        self.x, self.y = torch.randn(8, 3, 16, 16), torch.randint(0, 5, (8,))
        config = Config(policy="uniform", bits=BITS, min_numel=16, derive=False)
        self.hooks = SavedTensorHooks(model, config, 0)
        with self.hooks.hooks():
            self.gradient()
        self.hooks.plan = Plan(default=BITS)

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def gradient(self) -> list[Tensor]:
        self.model.zero_grad()
        self.loss().backward()
        return [parameter.grad.clone() for parameter in self.parameters]

    def error_of(self, found: list[Sensitivity], name: str) -> float:
        """The squared error of the gradient with one of the tensors at BITS, all others exact."""
        exact, error = self.gradient(), 0.0
        plan = Plan({**dict.fromkeys((item.name for item in found), None), name: BITS})
        for draw in range(1, DRAWS + 1):
            with self.hooks.rehearsal(plan, draw=draw):
                loss = self.loss()
            self.model.zero_grad()
            loss.backward()
            pairs = zip(self.parameters, exact, strict=True)
            error += sum(float((parameter.grad - one).square().sum()) for parameter, one in pairs) / DRAWS
        return error


def seeded(*arguments) -> Net:
    torch.manual_seed(1)
    return Net(*arguments)


def fed_to_checkpoints(found: list[Sensitivity]) -> list[Sensitivity]:
    return [item for item in found if item.name.split(":")[1].startswith(("BlockInput", "Tanh"))]


@pytest.mark.parametrize("whole", [False, True], ids=["by block", "as one part"])
@pytest.mark.parametrize("alias", [False, True], ids=["", "alias"])
@pytest.mark.parametrize(
    ("operator", "wiring"),
    [("relu", ""), ("max-pool", ""), ("relu", "reentrant"), ("relu", "inside"), ("relu", "skip"), ("gelu", "")],
)
def test_what_is_predicted_of_a_checkpoint_s_input_is_what_it_adds(operator, wiring, alias, whole, monkeypatch):
    """Each alone at 6 bits, where jumps are many times what a derivative shows.

    What blocks before it feel is sampled along 32 directions, and the gradient with as many draws: of a chi-squared
    variable with one degree of freedom each, a standard deviation of a quarter.
    """
    if whole:
        monkeypatch.setattr(one_pass, "blocks_of", lambda *_: [])
    job = Job(seeded(operator, wiring, alias))
    found = measure(job.hooks, job.model, job.loss, seed=1, probes=DRAWS)
    inputs = fed_to_checkpoints(found)
    assert len(inputs) >= 3
    for item in inputs:
        assert not item.by_perturbation
        error = job.error_of(found, item.name)
        assert float(item.variance[BITS - 1]) == pytest.approx(error, rel=0.35), item.name
        if wiring != "skip":  # there one of them goes through a sigmoid alone
            growth = float(item.variance[3] / item.variance[7])  # from 8 to 4 bits: 256 if it is smooth, 16 if it jumps
            assert growth > 200 if operator == "gelu" else growth < 60, item.name


@pytest.mark.parametrize(
    ("operator", "wiring", "perturbs"),
    [("opaque", "", False), ("opaque", "", True), ("relu", "", False), ("relu", "", True), ("gelu", "skip", True)],
)
def test_a_checkpoint_s_input_that_is_perturbed_moves_the_gradient(operator, wiring, perturbs):
    """With a backward that cannot be differentiated, and where every tensor is perturbed block by block, as it is with
    sharded parameters. Its block was not made again from what had been rounded: nothing moved, and it got one bit."""
    job = Job(seeded(operator, wiring))
    way = one_pass._ByWalk(job.hooks, job.model, 1, 1.0, DRAWS, perturbs=perturbs)
    found = way.measured(blocks_of(job.model), job.loss)
    inputs = fed_to_checkpoints(found)
    assert len(inputs) == 3
    for item in inputs:
        assert item.by_perturbation or not (perturbs or operator == "opaque")
        # with half of the squared difference of two roundings jumps count for 1 / sqrt(2)
        assert 0.4 < float(item.variance[BITS - 1]) / job.error_of(found, item.name) < 1.6, item.name
