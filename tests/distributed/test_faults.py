"""A rank fails, is slow or different, runs out of batches or has experts of its own: the others learn why, or go on."""

from __future__ import annotations

import datetime
import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from small_models import mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config

TIMEOUT_S = 2.0
SMALL = {"min_numel": 16, "calibration_samples": 4}


def quick_group():
    """All ranks, in a group that waits for two seconds."""
    return dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))


def job_of(config, group=None, wrapped=False):
    """(model, its controller, loss function, this rank's batch)."""
    model, (x, y) = mlp(seed=0, batch=16)
    model = DistributedDataParallel(model) if wrapped else model
    batch = x + dist.get_rank(), y
    gact = None if config is None else gact_dist.attach(model, config=config, process_group=group)
    return model, gact, lambda part: nn.functional.cross_entropy(model(part[0]), part[1]), batch


def train(gact, loss_fn, batch, steps=1, measures=True):
    for _ in range(steps):
        with gact.step(loss_fn, batch) if measures else gact.step():
            loss = loss_fn(batch)
        loss.backward()


# -- one rank goes another way ------------------------------------------------------------------------------------


def other_way(way):
    """(what this rank raised, after how many seconds) where rank 1 goes another way than rank 0."""
    group = quick_group()
    odd = dist.get_rank() == 1
    _, gact, loss_fn, batch = job_of(Config(**SMALL), group)
    begun = time.monotonic()
    try:
        if odd and way == "another state":
            state = gact.state_dict()
            text = state["gact_dist"].replace('"adapted_at": null', '"adapted_at": 0')
            assert text != state["gact_dist"]
            gact.load_state_dict({"gact_dist": text})
        if odd and way == "slow":
            time.sleep(2 * TIMEOUT_S)
            begun = time.monotonic()
        if not (odd and way == "absent"):
            train(gact, loss_fn, batch, measures=not (odd and way == "no loss function"))
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


@pytest.mark.parametrize("way", ["no loss function", "another state", "absent", "slow"])
def test_a_rank_that_does_not_come_is_named_when_the_groups_time_is_over(ranks, way):
    (message, after), (own_message, own_after) = ranks(other_way, way)
    assert message.startswith("adapting bits: rank 1 did not come within 2 s")
    assert TIMEOUT_S <= after < 3 * TIMEOUT_S
    assert own_after < TIMEOUT_S
    # the one that comes too late is told as well, at once
    assert own_message == (message if way == "slow" else "")


def differing(what):
    """What this rank raised, and after how many seconds, where rank 1 differs from rank 0 from the start."""
    settings = dict(SMALL)
    if dist.get_rank() == 1:
        settings |= {"calibration_samples": 3} if what == "settings" else {}
        settings |= {"policy": "uniform"} if what == "policy" else {}
        if what == "version":
            gact_dist.__version__ = "0.0.9"
    try:
        _, gact, loss_fn, batch = job_of(Config(**settings))
    finally:
        gact_dist.__version__ = "0.1.0"
    begun = time.monotonic()
    try:
        train(gact, loss_fn, batch)
    except gact_dist.PlanMismatchError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("settings", "Config.calibration_samples is 4 on rank 0; 3 on rank 1"),
        ("policy", "Config.policy is 'gact' on rank 0; 'uniform' on rank 1"),
        ("version", "gact_dist is 0.1.0 on rank 0; 0.0.9 on rank 1"),
    ],
)
def test_ranks_that_differ_are_told_at_once_in_what(ranks, what, named):
    for message, after in ranks(differing, what):
        assert named in message
        assert after < 1.0


def with_another_model():
    """The plan of this rank, where rank 1 has a layer more."""
    _, gact, _, _ = job_of(Config(**SMALL))
    model, (x, _) = mlp(seed=0, batch=16)
    if dist.get_rank() == 1:
        model.append(nn.Tanh())
    gact = gact_dist.attach(model, config=Config(**SMALL))
    train(gact, lambda part: model(part).square().mean(), x, steps=2)
    return gact.plan


def test_another_model_on_one_rank_shares_the_plan_by_name(ranks):
    first, second = ranks(with_another_model)
    assert first == second
    assert any(name.startswith("7:") or name.startswith(":Tanh") for name in first)


# -- one rank raises ----------------------------------------------------------------------------------------------


def raising_in_a_step(follow):
    """(plan, steps that raised, whether gradients are finite); rank 1 raises in forwards for which nobody waits."""
    model, gact, loss_fn, batch = job_of(Config(adapt_interval=2, adapt_tolerance=0.0, **SMALL))
    if follow:
        gact.follow()
    raised, step = [], 0

    def fail(*_):
        if dist.get_rank() == 1 and step in (0, 1, 3) and not gact._schedule.measuring:
            raise OSError("a disk is gone")

    model[3].register_forward_hook(fail)
    for step in range(6):
        try:
            with nullcontext() if follow else gact.step(loss_fn, batch):
                loss = loss_fn(batch)
            loss.backward()
        except OSError:
            raised.append(step)
    return gact.plan, raised, all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_a_forward_that_raises_on_one_rank_stops_no_adaptation(ranks, follow):
    (plan, raised, finite), (other_plan, other_raised, other_finite) = ranks(raising_in_a_step, follow)
    assert raised == []
    assert other_raised == [0, 1, 3]
    assert plan == other_plan
    assert plan
    assert finite
    assert other_finite


# -- one rank ends ------------------------------------------------------------------------------------------------


def killed_while_measuring():
    _, gact, loss_fn, batch = job_of(Config(**SMALL))
    train(gact, loss_fn, batch)

    def last(part):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(part)

    gact.calibrate(last, batch)


def test_a_killed_rank_ends_the_others_at_once_with_the_cause(ranks):
    # the lowest rank's error is raised here, if it comes within five seconds of the other's death
    with pytest.raises(RuntimeError, match=r"a collective of gact_dist failed \(.*another rank has ended, was killed"):
        ranks(killed_while_measuring)


# -- one rank runs out of batches -----------------------------------------------------------------------------------


def uneven(config, follow, epochs=2):
    """(weights, plan after each epoch, whether bits adapted in its join()): 5 batches on rank 0, on rank 1 3 and then
    none, with four even steps after each."""
    torch.manual_seed(0)
    model, gact, loss_fn, batch = job_of(config, wrapped=True)
    if gact is not None and follow:
        gact.follow()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        with nullcontext() if gact is None or follow else gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        optimizer.step()

    plans, adapted = [], []
    for epoch in range(epochs):
        before = None if gact is None else gact.adaptation
        with model.join():
            for _ in range(5 if dist.get_rank() == 0 else (3, 0)[epoch]):
                step()
        adapted.append(gact is not None and gact.adaptation is not before)
        for _ in range(4):
            step()
        plans.append({} if gact is None else gact.plan)
    if gact is not None:
        gact.detach()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), plans, adapted


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_uneven_batches_in_join_are_exact_with_exact_codecs(ranks, follow):
    untouched = [weights for weights, *_ in ranks(uneven, None, False)]
    assert torch.equal(*untouched)
    ours = [weights for weights, *_ in ranks(uneven, Config(policy="exact"), follow)]
    assert torch.equal(ours[0], untouched[0])
    assert torch.equal(ours[1], untouched[1])


@pytest.mark.parametrize("settings", [{}, {"policy": "acgc", "error": 0.5}], ids=["gact", "acgc"])
@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_bits_adapt_after_a_join_and_not_in_it(ranks, follow, settings):
    config = Config(adapt_interval=2, adapt_tolerance=0.0, **settings, **SMALL)
    (weights, plans, adapted), (other_weights, other_plans, other_adapted) = ranks(uneven, config, follow)
    assert torch.equal(weights, other_weights)
    assert plans == other_plans
    assert plans[0]
    assert adapted == other_adapted == [False, False]


# -- experts that each rank has of its own ----------------------------------------------------------------------------


class AllToAll(torch.autograd.Function):
    """[2 rows, width]: the first half of all ranks' rows go to rank 0, the second to rank 1."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


class Experts(nn.Module):
    """Each of two experts, one a rank, takes the half of the tokens that it is given the largest weight for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(64, 64), nn.Linear(64, 2), nn.Linear(64, 64)
        torch.manual_seed(10 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        names = [f"expert.{name}" for name, _ in self.expert.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, names)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        gates, half = self.router(x).softmax(-1), len(x) // 2
        picked = [gates[:, expert].topk(half).indices for expert in range(2)]
        found = AllToAll.apply(self.expert(AllToAll.apply(torch.cat([x[rows] for rows in picked]))))
        for expert, rows in enumerate(picked):
            x = x.index_add(0, rows, gates[rows, expert, None] * found[expert * half : (expert + 1) * half])
        return self.last(x)


def with_experts(config, follow):
    """(gradients of the last step, plan, predicted variance)."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Experts())
    torch.manual_seed(5 + dist.get_rank())
    x = torch.randn(32, 64)
    gact = None if config is None else gact_dist.attach(model, config=config)
    if gact is not None and follow:
        gact.follow()

    def loss_fn(batch):
        return model(batch).square().mean()

    for _ in range(4):
        model.zero_grad()
        with nullcontext() if gact is None or follow else gact.step(loss_fn, x):
            loss = loss_fn(x)
        loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    if gact is None:
        return gradients, {}, 0.0
    gact.detach()
    return gradients, gact.plan, gact.adaptation.predicted_variance if gact.adaptation else 0.0


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_experts_of_one_rank_have_bits_of_their_own(ranks, follow):
    untouched = ranks(with_experts, None, False)
    exact = ranks(with_experts, Config(policy="exact"), follow)
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(exact, untouched, strict=True))
    compressed = ranks(with_experts, Config.from_level("L2"), follow)
    assert compressed[0][1] == compressed[1][1]  # one plan, in which each rank's expert has names of its own
    experts = {name for name in compressed[0][1] if name.startswith("expert")}
    for rank in range(2):
        assert any(f"[rank {rank}]" in name for name in experts)
    assert len(experts) % 2 == 0
    for (gradients, _, predicted), (exact_gradients, _, _) in zip(compressed, untouched, strict=True):
        # the prediction is for a rank before gradients are averaged, which halves what is added to those of all ranks
        error = float((gradients - exact_gradients).square().sum())
        assert predicted / 8 < error < 2 * predicted
