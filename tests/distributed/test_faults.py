"""A rank fails, is slow or different, runs out of batches or has experts of its own: the others learn why, or go on."""

from __future__ import annotations

import datetime
import math
import os
import signal
import time
from contextlib import nullcontext, suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ddp_jobs import Job, Session, batch_of
from messages import Messages
from small_models import mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config
from gact_dist.distributed import logs
from gact_dist.sensitivity import rounded_walk, walk

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
        if not (odd and way == "absent"):
            train(gact, loss_fn, batch, measures=not (odd and way == "no loss function"))
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


@pytest.mark.parametrize("way", ["no loss function", "another state", "absent", "slow"])
def test_a_rank_that_does_not_come_is_named_when_the_groups_time_is_over(ranks, way):
    (message, after), (own_message, _) = ranks(other_way, way)
    assert message.startswith("adapting bits: rank 1 did not come within 2 s")
    assert after >= TIMEOUT_S
    # the one that comes too late is told as well
    assert own_message == (message if way == "slow" else "")


def differing(what):
    """What this rank raised where rank 1 differs from rank 0 from the start."""
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
    try:
        train(gact, loss_fn, batch)
    except gact_dist.PlanMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("settings", "Config.calibration_samples is 4 on rank 0; 3 on rank 1"),
        ("policy", "Config.policy is 'gact' on rank 0; 'uniform' on rank 1"),
        ("version", "gact_dist is 0.1.0 on rank 0; 0.0.9 on rank 1"),
    ],
)
def test_ranks_that_differ_are_told_in_what(ranks, what, named):
    """At once: in a group that waits for half an hour."""
    assert all(named in message for message in ranks(differing, what))


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


def uneven(config, follow, batches=((5, 3), (5, 0)), throws=False, joins=True):
    """(weights, plan after each epoch, steps that adapted in its join(), those after all): as many batches in each
    epoch as given for the two ranks, and four even steps after it. throws: join() ends with the first rank."""
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

    def adapted():
        return [] if gact is None else [entry["step"] for entry in gact.history if entry["tensors"]]

    plans, within = [], []
    for counts in batches:
        before = len(adapted())
        context = model.join(throw_on_early_termination=throws) if joins else nullcontext()
        with suppress(RuntimeError) if throws else nullcontext(), context:
            for _ in range(counts[dist.get_rank()]):
                step()
        within.append(adapted()[before:])
        for _ in range(4):
            step()
        plans.append({} if gact is None else gact.plan)
    if gact is not None:
        gact.detach()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), plans, within, adapted()


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_uneven_batches_in_join_are_exact_with_exact_codecs(ranks, follow):
    untouched = [weights for weights, *_ in ranks(uneven, None, False)]
    assert torch.equal(*untouched)
    ours = [weights for weights, *_ in ranks(uneven, Config(policy="exact"), follow)]
    assert torch.equal(ours[0], untouched[0])
    assert torch.equal(ours[1], untouched[1])


EVERY_SECOND = Config(adapt_interval=2, adapt_tolerance=0.0, **SMALL)


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_bits_adapt_in_a_join_until_a_rank_has_no_batches_left(ranks, follow):
    first, second = ranks(uneven, EVERY_SECOND, follow)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    # what is due when rank 1 is gone comes after the context, in the sixth step, and then every second
    within, after = ([2], [6, 8]) if follow else ([1, 3], [6, 8])
    assert first[2] == [within, []]
    assert first[3][: len(within) + 2] == within + after
    assert first[3][-1] > 9 + 5


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_a_join_in_which_all_ranks_have_as_many_batches_adapts_as_without(ranks, follow):
    """A loop that is within join() from its first step to the last, as its users write it."""
    joined, _ = ranks(uneven, EVERY_SECOND, follow, [(5, 5), (5, 5)])
    without, _ = ranks(uneven, EVERY_SECOND, follow, [(5, 5), (5, 5)], False, False)
    assert torch.equal(joined[0], without[0])
    assert joined[1:] == without[1:]
    assert len(joined[2][0]) > 1


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_a_join_that_ends_with_its_first_rank_leaves_both_at_the_same_step(ranks, follow):
    first, second = ranks(uneven, EVERY_SECOND, follow, [(5, 3), (4, 2)], True)
    assert first[1:] == second[1:]
    assert first[3] == sorted(first[3])


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
def test_an_error_bound_is_watched_in_a_join_until_a_rank_has_no_batches_left(ranks, follow):
    config = Config(policy="acgc", error=0.5, adapt_interval=2, adapt_tolerance=0.0, **SMALL)
    first, second = ranks(uneven, config, follow)
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[1][0]


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


# -- an error of ours in a measurement ------------------------------------------------------------------------------


def trained_with_a_fault(wrapper, faulty_ranks, piece):
    """(plan, losses, warnings) of a job in whose measurements some ranks meet an error of ours."""
    place, name = {
        "sensitivity": (walk.Walk, "_products"),
        "comparison": (rounded_walk.RoundedWalk, "_one_pass_through"),
    }[piece]

    def broken(*_, **__):
        raise AttributeError("as it happens")

    is_faulty = dist.get_rank() in faulty_ranks
    logs._said.clear()  # of earlier jobs of this process
    with Messages() as warnings, patch.object(place, name, broken) if is_faulty else nullcontext():
        session = Session(Job(kind="gpt", wrapper=wrapper), Config(min_numel=16, adapt_interval=2)).run(0, 4)
    plan = session.gact.plan
    return plan, session.finish().losses, warnings.texts


@pytest.mark.parametrize("piece", ["sensitivity", "comparison"])
@pytest.mark.parametrize("faulty_ranks", [[1], [0, 1]])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_an_error_of_ours_on_one_rank_costs_no_job(ranks, wrapper, faulty_ranks, piece):
    found = ranks(trained_with_a_fault, wrapper, faulty_ranks, piece)
    for rank, (plan, losses, messages) in enumerate(found):
        assert plan == found[0][0]
        # perturbation takes one product as well in the blocks of a sharded model
        assert bool(plan) == (wrapper == "ddp" or piece == "comparison")
        assert all(math.isfinite(loss) for loss in losses)
        said = [
            message for message in messages if "ended with an error of gact_dist on this rank (Attribute" in message
        ]
        assert len(said) == (1 if rank in faulty_ranks else 0)


def raised_by_a_loss_function(wrapper, error):
    """What each rank raises where the loss function of rank 1 does."""

    def loss_fn(batch):
        loss = session.loss_fn(batch)
        if dist.get_rank() == 1:
            raise error("mine")
        return loss

    session = Session(Job(kind="gpt", wrapper=wrapper), Config(min_numel=16))
    with Messages() as warnings:
        try:
            session.gact.calibrate(loss_fn, batch_of("gpt", 0, dist.get_rank()))
        except (RuntimeError, AttributeError) as raised:
            return f"{type(raised).__name__}: {raised}", warnings.texts
    return "", warnings.texts


@pytest.mark.parametrize(
    ("wrapper", "error"),
    [("ddp", RuntimeError), ("ddp", AttributeError), ("fsdp2", RuntimeError), ("fsdp2", AttributeError)],
)
def test_what_the_loss_function_of_one_rank_raises_is_named_on_all(ranks, wrapper, error):
    (first, warnings), (second, more) = ranks(raised_by_a_loss_function, wrapper, error)
    assert second == f"{error.__name__}: mine"
    assert first.startswith("RuntimeError: finding what a step keeps failed on other ranks")
    assert f"{error.__name__}: mine on rank 1" in first
    assert warnings == more == []


def with_parts_refused(wrapper, derive):
    """(plan, examples in each call of this rank's loss function) where that of rank 1 takes no part of its batch."""
    session = Session(Job(kind="gpt", wrapper=wrapper), Config(min_numel=16, derive=derive))
    seen = []

    def loss_fn(batch):
        seen.append(len(batch[0]))
        if dist.get_rank() == 1 and len(batch[0]) < len(whole[0]):
            raise ValueError("one label for each token, please")
        return session.loss_fn(batch)

    whole = batch_of("gpt", 0, dist.get_rank())
    with session.gact.step(loss_fn, whole):
        loss = session.loss_fn(whole)
    loss.backward()
    plan = session.gact.plan
    session.finish()
    return plan, seen


@pytest.mark.parametrize("derive", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_where_one_rank_refuses_parts_of_its_batch_all_that_share_parameters_take_larger_ones(ranks, wrapper, derive):
    (plan, seen), (other_plan, other_seen) = ranks(with_parts_refused, wrapper, derive)
    assert plan == other_plan
    assert plan
    sizes = sorted(set(other_seen))
    assert len(sizes) > 2
    assert sorted(set(seen)) == (sizes if wrapper != "ddp" else sizes[:1])
