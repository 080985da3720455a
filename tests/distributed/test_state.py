"""gact's state in torch.save and in torch.distributed.checkpoint, resumed at the same and at another world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_jobs import Job, Session
from modes import Cell, Pipeline, adamw, batch_of
from small_models import gpt, loss_of, mlp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import gact_dist
from gact_dist import Config

JOBS = {"DDP": Job(kind="gpt"), "FSDP2": Job(kind="gpt", wrapper="fsdp2")}
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


def parameters_of(session: Session) -> list[Tensor]:
    """This rank's part of each."""
    return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in session.model.parameters()]


WAYS = {"torch.save": (torch_save, torch_load), "torch.distributed.checkpoint": (dcp_save, dcp_load)}


def resumed(job: Job, way: str, path: str) -> tuple[list[bool], bool, bool, list[list[dict[str, Any]]]]:
    """Whether losses, weights and plan of a run that was stopped after four steps are those of one that was not, and
    the histories of both."""
    save, load = WAYS[way]
    straight = Session(job, CONFIG).run(0, 4)
    save(straight, path)
    random_state = torch.get_rng_state()
    wanted = straight.run(4, 4)
    second = Session(job, CONFIG)
    load(second, path)
    torch.set_rng_state(random_state)
    second.run(4, 4)
    losses = [bool(a == b) for a, b in zip(wanted.trace.losses[4:], second.trace.losses, strict=True)]
    weights = zip(parameters_of(wanted), parameters_of(second), strict=True)
    histories = [wanted.gact.history, second.gact.history]
    return losses, all(torch.equal(a, b) for a, b in weights), wanted.gact.plan == second.gact.plan, histories


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_resumed_run_is_bitwise_the_one_that_was_not_stopped(ranks, tmp_path, job, way):
    for losses, same_weights, same_plan, (wanted, history) in ranks(resumed, job, way, str(tmp_path)):
        assert losses == [True] * 4
        assert same_weights
        assert same_plan
        assert [entry["step"] for entry in history] == [1, 4, 7]
        assert history == wanted


def test_a_long_job_and_its_state_have_the_tensors_of_the_last_adaptations_only():
    model, batch = mlp()
    gact = gact_dist.attach(model, config=CONFIG)
    gact.disable()
    gact.enable()
    for _ in range(102):
        gact.calibrate(loss_of(model), batch)
    loaded = gact_dist.attach(model, config=CONFIG)
    loaded.load_state_dict(gact.state_dict())
    assert loaded.history == gact.history
    assert [entry["event"] for entry in gact.history[:2]] == ["disabled", "enabled"]
    assert not any("tensors" in entry for entry in gact.history[:2])
    assert [bool(entry["tensors"]) for entry in gact.history[2:]] == [False] * 2 + [True] * 100


def saved(job: Job, path: str) -> dict[str, int | None]:
    session = Session(job, CONFIG).run(0, 4)
    dcp_save(session, path)
    return session.gact.plan


def loaded(job: Job, path: str) -> tuple[dict[str, int | None], bool]:
    session = Session(job, CONFIG)
    dcp_load(session, path)
    plan = session.gact.plan
    session.run(4, 2)
    return plan, all(bool(loss.isfinite()) for loss in session.trace.losses)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_plan_is_the_same_at_another_world_size(ranks, tmp_path, job, world_size):
    plan = ranks(saved, job, str(tmp_path), world_size=2)[0]
    for found, finite in ranks(loaded, job, str(tmp_path), world_size=world_size):
        assert found == plan != {}
        assert finite


class Staged:
    """A pipeline job of two stages, one a rank, that is followed; without dropout, so that no generator has a part."""

    def __init__(self) -> None:
        self.job = Pipeline(Cell("PP", "none", "fp32", "eager"), adamw)
        self.job.model.eval()
        self.gact = self.job.attach(CONFIG)

    def run(self, first_step: int, steps: int) -> list[float]:
        losses = []
        for step in range(first_step, first_step + steps):
            losses.append(float(self.job.forward_backward(*batch_of(step, 0)).detach()))
            self.job.update()
        return losses

    def states(self) -> dict[str, Any]:
        """The stages of this job give some parameters the same name; controllers keep theirs apart by themselves."""
        weights = self.job.model.state_dict()
        return {"gact": self.gact.state_dict(), f"stage{dist.get_rank()}": weights}


def resumed_stage(path: str) -> tuple[bool, bool, dict[str, int | None]]:
    """Whether losses and plan of a stage that was resumed are those of one that was not stopped, and its plan."""
    straight = Staged()
    straight.run(0, 4)
    saved_plan = straight.gact.plan
    dcp.save(straight.states(), checkpoint_id=path)
    straight.job.optimizer = adamw(straight.job.model.parameters())  # only weights are in the checkpoint
    wanted = straight.run(4, 4)
    second = Staged()
    states = second.states()
    dcp.load(states, checkpoint_id=path)
    second.gact.load_state_dict(states["gact"])
    second.job.model.load_state_dict(states[f"stage{dist.get_rank()}"])
    same_plan = second.gact.plan == saved_plan
    losses = second.run(4, 4)
    return losses == wanted, same_plan and second.gact.plan == straight.gact.plan, saved_plan


def test_each_stage_of_a_pipeline_gets_its_own_plan_back(ranks, tmp_path):
    found = ranks(resumed_stage, str(tmp_path))
    for same_losses, same_plan, _ in found:
        assert same_losses
        assert same_plan
    first, last = ({name.split(":")[0] for name in plan} for *_, plan in found)
    assert "norm" in last - first


def exchanged() -> str:
    """What loading the other stage's state says."""
    stage = Staged()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, stage.gact.state_dict())
    (own,) = states[dist.get_rank()].values()
    stage.gact.load_state_dict({"gact_dist": own})  # as it was saved before stages had keys of their own
    with pytest.raises(ValueError, match="expected") as refused:
        stage.gact.load_state_dict(states[1 - dist.get_rank()])
    return str(refused.value)


def test_the_state_of_another_stage_is_refused(ranks):
    assert all("pass what the same stage saved" in said for said in ranks(exchanged))


def test_a_state_that_names_no_module_of_the_model_is_refused():
    (model, batch), (other, _) = gpt(), mlp()
    gact = gact_dist.attach(model, config=CONFIG)
    gact.calibrate(loss_of(model), batch)
    with pytest.raises(ValueError, match=r"bits for modules blocks.0.*expected modules of this model, which has 0, 1"):
        gact_dist.attach(other, config=CONFIG).load_state_dict(gact.state_dict())
