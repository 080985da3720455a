"""Config.run_dir: what a run writes about itself, that no step waits for it, and that no disk stops a job."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path

import pytest
import small_models
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config, run_log


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(gact: gact_dist.Controller, model: torch.nn.Module, batch, steps: int, given: bool = True) -> list[float]:
    loss_fn = small_models.loss_of(model)
    losses = []
    for _ in range(steps):
        with gact.step(*((loss_fn, batch) if given else ())):
            loss = loss_fn(batch)
        gact.log(loss=loss, rate=0.5)
        loss.backward()
        losses.append(loss.item())
    return losses


def test_a_line_a_step_and_one_an_adaptation(tmp_path):
    model, batch = small_models.mlp()
    config = Config(min_numel=64, adapt_interval=2, adapt_tolerance=0.0, run_dir=str(tmp_path))
    gact = gact_dist.attach(model, config=config)
    losses = train(gact, model, batch, 5)
    report, history = gact.report(), gact.history
    gact.detach()
    steps = lines(tmp_path / "steps.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in steps] == losses
    assert {line["rate"] for line in steps} == {0.5}
    assert (steps[-1]["retained_bytes"], steps[-1]["exact_bytes"]) == (report.retained_bytes, report.exact_bytes)
    for line in steps:
        assert 0 < line["compressing_s"] < line["time_s"]
        assert line["peak_bytes"] > 0
    measured = {line["step"] for line in steps if line["measuring_s"]}
    assert measured >= {entry["step"] for entry in history}
    assert measured < set(range(1, 6))
    assert lines(tmp_path / "adaptations.jsonl") == json.loads(json.dumps(history))
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["version"], about["world_size"], about["config"]["adapt_interval"]) == (1, 1, 2)
    assert about["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    compared = lines(tmp_path / "gradient.jsonl")
    assert {line["step"] for line in compared} >= {entry["step"] for entry in history}
    assert all(line["measured"] > 0 and line["squared_gradient"] > 0 for line in compared)


def test_saved_tensors_are_those_of_the_report(tmp_path):
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(min_numel=64, run_dir=str(tmp_path)))
    train(gact, model, batch, 1)
    rows = gact.report().rows
    gact.detach()
    [saved] = lines(tmp_path / "saved.jsonl")
    assert saved["step"] == 1
    assert [row[0] for row in saved["rows"]] == [row.name for row in rows]
    assert [row[5] for row in saved["rows"]] == [row.bytes for row in rows]


def test_the_last_step_is_written_when_the_controller_is_gone(tmp_path):
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, level=None, config=Config(policy="uniform", run_dir=str(tmp_path)))
    train(gact, model, batch, 2)
    del gact, model
    gc.collect()
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1, 2]


def test_with_policy_off_each_log_is_a_step(tmp_path):
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(policy="off", run_dir=str(tmp_path)))
    losses = train(gact, model, batch, 3)
    gact.detach()
    steps = lines(tmp_path / "steps.jsonl")
    assert [(line["step"], line["loss"]) for line in steps] == list(enumerate(losses, 1))
    assert all("retained_bytes" not in line for line in steps)


def test_without_a_folder_nothing_is_written_and_log_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model)
    train(gact, model, batch, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_changes_nothing_of_the_job(tmp_path):
    gradients = []
    for run_dir in (None, str(tmp_path)):
        torch.manual_seed(0)
        model, batch = small_models.mlp()
        gact = gact_dist.attach(model, config=Config(min_numel=64, adapt_interval=2, run_dir=run_dir))
        train(gact, model, batch, 4)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(min_numel=64, run_dir=str(tmp_path / "file")))
    with caplog.at_level(logging.WARNING):
        train(gact, model, batch, 3)
        gact.detach()
    assert [text for text in caplog.messages if "cannot be written" in text] == caplog.messages
    assert len(caplog.messages) <= 1


def test_a_disk_that_fills_up_is_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(run_log, "_FLUSH_S", -1.0)
    (tmp_path / "steps.jsonl").symlink_to("/dev/full")
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(min_numel=64, run_dir=str(tmp_path)))
    losses = train(gact, model, batch, 4)
    gact.detach()
    assert len(losses) == 4
    assert [text.partition(" (")[0] for text in caplog.messages] == ["the log of this run cannot be written to run_dir"]


def test_a_number_that_has_not_arrived_holds_up_no_step(tmp_path, monkeypatch):
    """A tensor on a device that is late: its lines come later, in order, and nobody asks for its value before."""
    arrived = []

    class Late:
        def __init__(self, tensor):
            self.number = float(tensor)

        def arrived(self):
            return self.number in arrived

        def value(self):
            assert self.arrived() or closing
            return self.number

    monkeypatch.setattr(run_log, "_Number", Late)
    monkeypatch.setattr(run_log, "_FLUSH_S", -1.0)
    closing = False
    log = run_log.RunLog(str(tmp_path), 0, {}, torch.device("cpu"))
    for step in (1, 2, 3):
        log.begin(step)
        log.add({"loss": torch.tensor(float(step))})
    log.begin(4)
    assert not (tmp_path / "steps.jsonl").exists()
    arrived += [1.0, 2.0]
    log.begin(5)
    assert [line["loss"] for line in lines(tmp_path / "steps.jsonl")] == [1.0, 2.0]
    closing = True
    log.close()
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1, 2, 3, 4, 5]


def test_what_is_not_finite_is_null(tmp_path):
    log = run_log.RunLog(str(tmp_path), 0, {}, torch.device("cpu"))
    log.begin(1)
    log.add({"loss": torch.tensor(float("nan")), "rate": float("inf")})
    log.close()
    [line] = lines(tmp_path / "steps.jsonl")
    assert (line["loss"], line["rate"]) == (None, None)


def test_a_tensor_of_several_numbers_is_refused(tmp_path):
    gact = gact_dist.attach(torch.nn.Linear(2, 2), config=Config(run_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"log\(loss=\.\.\.\) got a tensor of shape \(2,\), expected one number"):
        gact.log(loss=torch.zeros(2))


def logged_on_ranks(folder: str) -> float:
    torch.manual_seed(0)
    model, batch = small_models.mlp()
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    gact = gact_dist.attach(wrapped, config=Config(min_numel=64, adapt_interval=2, adapt_tolerance=0.0, run_dir=folder))
    losses = train(gact, wrapped, batch, 4)
    gact.detach()
    return losses[-1]


def test_rank_0_writes_and_each_rank_says_which_plan_it_has(ranks, tmp_path):
    losses = ranks(logged_on_ranks, str(tmp_path))
    assert lines(tmp_path / "steps.jsonl")[-1]["loss"] == losses[0]
    assert json.loads((tmp_path / "run.json").read_text())["world_size"] == 2
    of_ranks = [lines(tmp_path / "ranks" / f"rank{rank}.jsonl") for rank in (0, 1)]
    assert [line["step"] for line in of_ranks[0]] == [line["step"] for line in of_ranks[1]] == [1, 3]
    assert [line["plan"] for line in of_ranks[0]] == [line["plan"] for line in of_ranks[1]]
    assert all(line["retained_bytes"] > 0 for rank in of_ranks for line in rank)
