"""What leaves the job untouched: disable(), GACT_DISABLE=1 and level L0."""

import json
from typing import ClassVar

import pytest
import torch
from small_models import gpt, loss_of

import gact_dist
from gact_dist import Config
from gact_dist._torch_internals import innermost_hooks

ADAPTIVE = Config.from_level("L2", adapt_interval=2, adapt_tolerance=0, min_numel=16)


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    yield
    while Job.attached:  # hooks of install_hook() belong to the thread
        Job.attached.pop().detach()


class Job:
    """A training job in each of the three ways to step."""

    attached: ClassVar[list[gact_dist.Controller]] = []

    def __init__(self, way, config=ADAPTIVE, attach=True):
        self.model, self.batch = gpt(dropout=0.1)
        self.way, self.loss_fn = way, loss_of(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.forwards = 0
        self.gact = gact_dist.attach(self.model, config=config) if attach else None
        if self.gact is not None:
            Job.attached.append(self.gact)
        if self.gact is not None and way == "follow":
            self.gact.follow()
        if self.gact is not None and way == "install":
            self.gact.install_hook()

    def forward(self):
        self.forwards += 1
        return self.loss_fn(self.batch)

    def closure(self):
        loss = self.forward()
        self.optimizer.zero_grad()
        loss.backward()

    def train(self, steps):
        losses = []
        for _ in range(steps):
            if self.way == "step" and self.gact is not None:
                with self.gact.step(self.loss_fn, self.batch):
                    loss = self.forward()
            else:
                loss = self.forward()
            self.optimizer.zero_grad()
            loss.backward()
            if self.way == "install" and self.gact is not None:
                self.gact.iterate(self.closure)
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def weights(self):
        return [parameter.detach().clone() for parameter in self.model.parameters()]


WAYS = pytest.mark.parametrize("way", ["step", "follow", "install"])


def untouched(steps, way="step"):
    torch.manual_seed(5)
    job = Job(way, attach=False)
    return job.train(steps), job.weights()


def hooks_of(model):
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def same(found, expected):
    pairs = [pair for parts in zip(found, expected, strict=True) for pair in zip(*parts, strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


def switched_off(monkeypatch, switch):
    if switch == "environment":
        monkeypatch.setenv("GACT_DISABLE", "1")
    torch.manual_seed(5)
    return Config.from_level("L0") if switch == "L0" else ADAPTIVE


@WAYS
@pytest.mark.parametrize("switch", ["environment", "disable", "L0"])
def test_a_job_that_is_switched_off_is_the_untouched_one_bit_for_bit(monkeypatch, switch, way):
    expected = untouched(3, way)
    job = Job(way, switched_off(monkeypatch, switch))
    if switch == "disable":
        job.gact.disable()
    assert hooks_of(job.model) == (way == "install")  # what tells iterate() that a forward ran
    assert "_call_impl" not in vars(job.model)
    assert same((job.train(3), job.weights()), expected)
    assert innermost_hooks() is None
    assert job.gact.report().rows == ()
    assert job.gact.plan == {}
    job.gact.detach()


@WAYS
@pytest.mark.parametrize("switch", ["environment", "disable"])
def test_from_the_next_forward_on_nothing_is_compressed_measured_or_communicated(monkeypatch, switch, way):
    def refuse(*_, **__):
        raise AssertionError("something of the package ran")

    torch.manual_seed(5)
    job = Job(way)
    job.train(3)
    plan = job.gact.plan
    with monkeypatch.context() as patch:
        if switch == "disable":
            job.gact.disable()
        else:
            patch.setenv("GACT_DISABLE", "1")
        patch.setattr("gact_dist.hooks.engine.SavedTensorHooks._pack", refuse)
        patch.setattr("gact_dist.adaptation.Adapter.adapt", refuse)
        patch.setattr("gact_dist.steps.following.all_ranks", refuse)
        job.train(4)
        job.gact.calibrate(refuse, job.batch)
        assert hooks_of(job.model) == (way == "install")
        assert innermost_hooks() is None
    assert job.gact.plan == plan
    job.gact.enable()
    job.train(3)
    if way == "install":  # iterate() has begun the next iteration
        job.forward()
    assert "quantised" in {row.codec for row in job.gact.report().rows}
    assert [entry.get("event") for entry in job.gact.history if "event" in entry] == ["disabled", "enabled"]
    job.gact.detach()
    assert hooks_of(job.model) == 0


@WAYS
@pytest.mark.parametrize("switch", ["environment", "disable"])
def test_steps_while_it_is_off_are_those_of_the_untouched_job(monkeypatch, switch, way):
    torch.manual_seed(5)
    job, other = Job(way), Job(way, attach=False)
    job.train(2)
    other.model.load_state_dict(job.model.state_dict())
    if switch == "disable":
        job.gact.disable()
    else:
        monkeypatch.setenv("GACT_DISABLE", "1")
    state = torch.get_rng_state()
    found = job.train(3), job.weights()
    torch.set_rng_state(state)
    assert same(found, (other.train(3), other.weights()))


@pytest.mark.parametrize("way", ["step", "follow"])
def test_a_forward_that_runs_goes_on_as_it_began(way):
    torch.manual_seed(5)
    job = Job(way)
    job.train(2)
    names = {row.name for row in job.gact.report().rows}
    handle = job.model.blocks[1].register_forward_pre_hook(lambda *_: job.gact.disable())
    job.train(1)
    handle.remove()
    assert {row.name for row in job.gact._schedule.hooks.account.rows} == names
    assert hooks_of(job.model) == 0
    job.gact.enable()
    job.train(1)
    assert {row.name for row in job.gact.report().rows} == names


@WAYS
def test_states_are_saved_and_loaded_while_it_is_off(way):
    torch.manual_seed(5)
    job = Job(way)
    job.train(3)
    job.gact.disable()
    state = job.gact.state_dict()
    assert json.loads(state["gact_dist"])["history"][-1]["event"] == "disabled"
    other = Job(way)
    other.gact.disable()
    other.gact.load_state_dict(state)
    assert other.gact.plan == job.gact.plan
    other.gact.enable()
    other.train(1)
    assert {row.name for row in other.gact.report().rows if row.codec == "quantised"} <= set(other.gact.plan)
    other.gact.detach()
    job.gact.detach()


def test_the_environment_has_the_last_word(monkeypatch, caplog):
    monkeypatch.setenv("GACT_DISABLE", "1")
    job = Job("follow")
    job.gact.enable()
    assert "GACT_DISABLE is 1" in caplog.text
    assert hooks_of(job.model) == 0
    assert job.gact.history == [{"step": 0, "event": "disabled", "why": "GACT_DISABLE"}]
    monkeypatch.setenv("GACT_DISABLE", "0")
    assert hooks_of(Job("follow").model) > 0
    monkeypatch.setenv("GACT_DISABLE", "yes")
    with pytest.raises(ValueError, match="GACT_DISABLE is 'yes', expected 1 or 0"):
        Job("follow")


@WAYS
def test_what_a_forward_saves_has_its_names_again_when_the_environment_allows_it(monkeypatch, way):
    torch.manual_seed(5)
    job = Job(way)
    job.train(3)
    if way == "install":
        job.forward()
    names = {row.name for row in job.gact.report().rows}
    for value in ("1", "0"):
        monkeypatch.setenv("GACT_DISABLE", value)
        job.train(2)
        job.gact.enable()
        assert job.gact._schedule.enabled == (value == "0")
    job.train(1)
    if way == "install":
        job.forward()
    assert {row.name for row in job.gact.report().rows} == names


def test_a_word_in_the_environment_that_is_none_does_not_end_a_job_that_runs(monkeypatch):
    job = Job("step")
    job.train(1)
    monkeypatch.setenv("GACT_DISABLE", "yes")
    job.train(1)
    assert job.gact.report().rows


def test_disabling_twice_and_after_detach():
    job = Job("step")
    job.gact.disable()
    job.gact.disable()
    assert len(job.gact.history) == 1
    job.gact.detach()
    with pytest.raises(RuntimeError, match="detached"):
        job.gact.disable()
    with pytest.raises(RuntimeError, match="detached"):
        job.gact.enable()
