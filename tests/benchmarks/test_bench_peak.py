"""bench_peak.py at tiny sizes: its figures are what a count by hand gives, and a failed case is a row."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

import gact_dist
from benchmarks.step import bench_peak
from benchmarks.step.bench_peak import METHODS, Training, cases, live_peaks, main, table, worst_and_later
from benchmarks.step.peak_jobs import JOBS, SMALL_SIZES, UNSHARDED, Job

KIB = 1024
DOWNLOADED = ("text", "image")
OFFLINE = [name for name in JOBS if name not in DOWNLOADED]


def small(name: str) -> Job:
    torch.manual_seed(0)
    return JOBS[name](**SMALL_SIZES[name])


def gradients(job: Job) -> list[torch.Tensor]:
    torch.manual_seed(1)
    parameters = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(job.loss(job.model, job.batch), parameters))


def test_live_storages_are_counted_exactly():
    held: list[torch.Tensor] = []

    def start() -> None:
        held.append(torch.empty(KIB, dtype=torch.uint8))  # above what was there before, in all steps

    def first() -> None:
        a = torch.empty(3 * KIB, dtype=torch.uint8)
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        view = b[KIB:]  # a view keeps its whole storage
        del b
        c = torch.empty(4 * KIB, dtype=torch.uint8)
        del a, c
        held.append(view)

    steps = iter([first, lambda: None, lambda: torch.empty(KIB, dtype=torch.uint8)])
    peaks = live_peaks(start, lambda: next(steps)(), 3)
    assert peaks == [(1 + 3 + 2 + 4) * KIB, (1 + 2) * KIB, (1 + 2 + 1) * KIB]


def test_what_another_thread_frees_is_counted():
    held: list[torch.Tensor] = []

    def step() -> None:
        held.append(torch.empty(2 * KIB, dtype=torch.uint8))
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        torch.empty(KIB, dtype=torch.uint8)

    assert live_peaks(lambda: None, step, 3) == [2 * KIB] * 3


def test_the_peak_of_a_training_step_is_the_count_by_hand():
    """x -> exp -> exp -> exp -> sum: backward's first node holds all three outputs, its gradient and its result."""
    weight = nn.Parameter(torch.zeros(64, 64))
    model = nn.Module()
    model.weight = weight
    job = Job(
        model=model,
        loss=lambda model, batch: (model.weight + batch).exp().exp().exp().sum(),
        batch=torch.full((64, 64), -3.0),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        blocks=[],
    )
    training = Training(job, "untouched")
    one, scalar = weight.nbytes, 4
    # the loss, its gradient of one (expanded, without memory of its own), and two gradients beside the three outputs
    assert live_peaks(training.start, training.step, 2) == [4 * one + 2 * scalar] * 2


def test_an_adaptation_is_in_the_step_that_it_is_counted_for():
    training = Training(small("long"), "L2", steps=4)
    peaks = live_peaks(training.start, training.step, 4)
    assert training.adapted_at() == [0, 2]
    # the second step compares its gradient with the exact one
    assert min(peaks[0], peaks[2]) > peaks[1] > 1.2 * peaks[3]
    training.stop()
    assert training.adapted_at() == []


def test_a_level_keeps_less_than_the_untouched_job_and_so_does_a_checkpoint():
    later = {}
    for method in ("untouched", "checkpointing", "L1", "L2"):
        training = Training(JOBS["long"](length=256, layers=3, width=32), method, steps=4)
        later[method] = live_peaks(training.start, training.step, training.steps)[-1]
        training.stop()
    assert max(later["L1"], later["L2"], later["checkpointing"]) < 0.8 * later["untouched"]


@pytest.mark.large
def test_what_a_block_recomputes_is_compressed_as_well_where_the_method_says_so():
    later = {}
    for method in ("L2 with checkpointing", "L2 with recomputed"):
        training = Training(small("llama_deep"), method, steps=4)
        training.start()
        assert training.gact.config.recomputed is (method == "L2 with recomputed")
        training.stop()
        peaks = live_peaks(training.start, training.step, 8)
        later[method] = peaks[-1]
        training.stop()
    assert later["L2 with recomputed"] < later["L2 with checkpointing"]


@pytest.mark.parametrize("name", OFFLINE)
def test_checkpoints_give_the_untouched_gradients(name):
    untouched, job = gradients(small(name)), small(name)
    bench_peak.checkpoint_blocks(job)
    job.model.train()
    assert all(torch.equal(a, b) for a, b in zip(gradients(job), untouched, strict=True))
    assert sum(float(gradient.norm()) for gradient in untouched) > 0


@pytest.mark.parametrize("name", OFFLINE)
def test_all_blocks_of_a_job_are_checkpointed(name):
    """Counted by gact_dist's own exact level, under whose hooks both run."""
    kept = {}
    for method in ("untouched", "checkpointing"):
        job = small(name)
        Training(job, method)
        gact = gact_dist.attach(job.model, level="exact")
        with gact.step():
            job.loss(job.model, job.batch)
        kept[method] = gact.report().retained_bytes
        gact.detach()
    assert kept["checkpointing"] < kept["untouched"]


def test_each_step_of_a_followed_model_is_a_step():
    training = Training(small("llama"), "L2", follow=True, steps=4)
    training.start()
    for _ in range(training.steps):
        training.step()
    assert training.adapted_at() == [1, 3]  # an adaptation needs the step before
    training.stop()


def test_later_steps_are_those_after_the_last_adaptation():
    row = {"live_bytes": [9, 2, 8, 3, 5, 4], "adapted_at": [0, 2]}
    assert worst_and_later(row, "live") == (9, 4)
    assert worst_and_later({**row, "adapted_at": []}, "live") == (9, 4)  # the first step is no later one
    assert worst_and_later({**row, "adapted_at": [0, 5]}, "live") == (9, 4)  # there are none: the last step itself


def test_what_is_not_sharded_is_left_out_on_two_ranks():
    options = Namespace(jobs=["gat", "vit"], methods=["L1"], ranks=[1, 2])
    assert cases(options) == [("gat", "L1", 1), ("vit", "L1", 1), ("vit", "L1", 2)]


def test_the_table_has_a_row_for_each_job_and_number_of_ranks():
    peaks = {"resident_bytes": [30_000_000, 10_000_000], "live_bytes": [20_000_000, 9_000_000], "adapted_at": [0]}
    rows = [
        {"job": "vit", "ranks": 1, "method": "untouched", **peaks, "adapted_at": []},
        {"job": "vit", "ranks": 1, "method": "L2", **peaks},
        {"job": "vit", "ranks": 2, "method": "L2", "error": "broken"},
    ]
    lines = table({"rows": rows}).splitlines()
    assert lines[2:6] == [
        "| job | untouched | L2 |",
        "|---|---|---|",
        "| vit | 30 / 10 | 30 / 10 |",
        "| vit, FSDP2 on 2 ranks |  | failed |",
    ]
    assert "| vit | 20 / 9 | 20 / 9 |" in lines


# -- the script, with processes of its own -----------------------------------------------------------------------------


def run_main(path: Path, *arguments: str) -> int:
    return main(["--small", "--json", str(path), "--steps", "2", *arguments])


def test_a_case_is_measured_in_a_process_of_its_own_and_written_beside_the_others(tmp_path, capsys):
    path = tmp_path / "peak.json"
    path.write_text(json.dumps({"rows": [{"job": "gat", "ranks": 1, "method": "L1", "error": "of an earlier run"}]}))
    assert run_main(path, "--jobs", "long", "--methods", "L2", "--ranks", "1") == 0
    report = json.loads(path.read_text())
    assert report["torch"] == torch.__version__
    earlier, row = report["rows"]
    assert earlier["error"] == "of an earlier run"
    assert (row["job"], row["ranks"], row["method"], row["adapted_at"]) == ("long", 1, "L2", [0, 1])
    assert len(row["resident_bytes"]) == len(row["live_bytes"]) == len(row["step_s"]) == 2
    # the other process counts what this one does; the resident set holds at least that
    training = Training(small("long"), "L2", steps=2)
    assert row["live_bytes"] == live_peaks(training.start, training.step, 2)
    capsys.readouterr()
    assert main(["--table", str(path)]) == 0
    assert "| gat | failed |" in capsys.readouterr().out


@pytest.mark.large
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_measured_on_two_ranks(tmp_path, method):
    path = tmp_path / "new" / "peak.json"
    assert run_main(path, "--jobs", *OFFLINE, "--methods", method, "--ranks", "2") == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["job"] for row in rows] == [name for name in OFFLINE if name not in UNSHARDED]
    assert all(min(row["live_bytes"]) > 0 for row in rows)


def test_a_case_that_fails_is_a_row_with_its_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_peak.sys, "executable", "/bin/false")
    path = tmp_path / "peak.json"
    assert run_main(path, "--jobs", "vit", "--methods", "L1", "--ranks", "1") == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["error"] == "exit status 1"
    assert "failed" in capsys.readouterr().out
