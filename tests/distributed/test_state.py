"""gact's state in torch.save and in torch.distributed.checkpoint, resumed at the same and at another world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_jobs import Job, Session
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from gact_dist import Config

JOB = Job(kind="gpt")
CONFIG = Config(bits=4, adapt_interval=3, adapt_tolerance=0, calibration_samples=4, min_numel=16)


def torch_save(session: Session, path: str) -> None:
    torch.save(_everything(session), f"{path}/rank{dist.get_rank()}.pt")


def torch_load(session: Session, path: str) -> None:
    saved = torch.load(f"{path}/rank{dist.get_rank()}.pt", weights_only=True)
    session.model.load_state_dict(saved["model"])
    session.optimizer.load_state_dict(saved["optimizer"])
    session.gact.load_state_dict(saved["gact"])


def _everything(session: Session) -> dict[str, Any]:
    states = {"model": session.model.state_dict(), "optimizer": session.optimizer.state_dict()}
    return states | {"gact": session.gact.state_dict()}


def dcp_save(session: Session, path: str) -> None:
    model, optimizer = get_state_dict(session.model, session.optimizer)
    dcp.save({"model": model, "optimizer": optimizer, "gact": session.gact.state_dict()}, checkpoint_id=path)


def dcp_load(session: Session, path: str) -> None:
    model, optimizer = get_state_dict(session.model, session.optimizer)
    gact = session.gact.state_dict()
    dcp.load({"model": model, "optimizer": optimizer, "gact": gact}, checkpoint_id=path)
    session.gact.load_state_dict(gact)
    set_state_dict(session.model, session.optimizer, model_state_dict=model, optim_state_dict=optimizer)


WAYS = {"torch.save": (torch_save, torch_load), "torch.distributed.checkpoint": (dcp_save, dcp_load)}


def resumed(way: str, path: str) -> tuple[list[bool], bool, bool]:
    """Whether losses, weights and plan of a run that was stopped after four steps are those of one that was not."""
    save, load = WAYS[way]
    straight = Session(JOB, CONFIG).run(0, 4)
    save(straight, path)
    random_state = torch.get_rng_state()
    wanted = straight.run(4, 4)
    second = Session(JOB, CONFIG)
    load(second, path)
    torch.set_rng_state(random_state)
    second.run(4, 4)
    losses = [bool(a == b) for a, b in zip(wanted.trace.losses[4:], second.trace.losses, strict=True)]
    weights = zip(wanted.model.parameters(), second.model.parameters(), strict=True)
    return losses, all(torch.equal(a, b) for a, b in weights), wanted.gact.plan == second.gact.plan


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_is_bitwise_the_one_that_was_not_stopped(ranks, tmp_path, way):
    for losses, same_weights, same_plan in ranks(resumed, way, str(tmp_path)):
        assert losses == [True] * 4
        assert same_weights
        assert same_plan


def saved(path: str) -> dict[str, int | None]:
    session = Session(JOB, CONFIG).run(0, 4)
    dcp_save(session, path)
    return session.gact.plan


def loaded(path: str) -> tuple[dict[str, int | None], bool]:
    session = Session(JOB, CONFIG)
    dcp_load(session, path)
    plan = session.gact.plan
    session.run(4, 2)
    return plan, all(bool(loss.isfinite()) for loss in session.trace.losses)


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_plan_is_the_same_at_another_world_size(ranks, tmp_path, world_size):
    plan = ranks(saved, str(tmp_path), world_size=2)[0]
    for found, finite in ranks(loaded, str(tmp_path), world_size=world_size):
        assert found == plan != {}
        assert finite
