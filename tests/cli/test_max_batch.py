"""gact-dist max-batch: the search, one try in a process of its own, and what is shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import plotly
import pytest
import torch
from torch import nn

from gact_dist._errors import says_out_of_memory
from gact_dist.cli import max_batch, output, pictures
from gact_dist.cli.batch_search import Probe
from gact_dist.cli.max_batch import confirm, run_trial, search
from gact_dist.cli.output import CommandError
from gact_dist.cli.trial import Trial, checkpoint_blocks

ROOT = Path(__file__).parents[2]
LARGE = '''
import torch
from torch import nn


def job(batch, sequence=1):
    """16 MiB of activations for each of the batch, in one tensor that a backward needs."""
    model = nn.Sequential(nn.Linear(4, 1 << 22, bias=False), nn.Sigmoid())
    with torch.no_grad():
        model[0].weight.zero_()
    return model, torch.zeros(batch * sequence, 4), lambda batch: model(batch).mean()


def breaks(batch):
    raise KeyError("no such column")
'''


@pytest.fixture
def large(tmp_path) -> Path:
    path = tmp_path / "large_job.py"
    path.write_text(LARGE)
    return path


def trial(job: str, **changes: object) -> Trial:
    settings = {
        "job": job, "batch": 1, "sequence": None, "level": "L0", "checkpoints": False, "memory_bytes": 1 << 30,
        "device": "cpu", "optimizer": "none",
    }  # fmt: skip
    return Trial(**{**settings, **changes})


def test_a_try_that_fits_has_a_time_and_a_peak_and_one_that_does_not_a_reason(large):
    # the weight is 64 MiB, its gradient as much, and each of the batch 16 MiB of the output, its gradient and sigmoid's
    fits = run_trial(trial(f"{large}:job", batch=2, memory_bytes=512 << 20), 2, 120)
    assert fits.fits
    assert fits.step_s > 0
    assert 128 << 20 < fits.peak_bytes < 512 << 20
    too_large = run_trial(trial(f"{large}:job", batch=64, memory_bytes=512 << 20), 64, 120)
    assert not too_large.fits
    assert "can't allocate memory" in too_large.reason


def test_a_function_that_fails_otherwise_is_an_error(large, run):
    result = run("max-batch", f"{large}:breaks", "--memory", "1GiB", "--levels", "L0", "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a try of 4 failed:" in result.stderr
    assert "KeyError: 'no such column'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def tried(monkeypatch) -> list[Trial]:
    """The tries of a command, on a machine where checkpointing and L2 hold twice as much as the untouched job."""
    tries: list[Trial] = []

    def pretend(attempted: Trial, size: int, timeout_s: float) -> Probe:
        tries.append(attempted)
        border = 40 * (1 + (attempted.level == "L2")) * (1 + attempted.checkpoints)
        fits = size <= border
        return Probe(batch=size, fits=fits, step_s=size / 100 if fits else None, reason="" if fits else "out of memory")

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    return tries


def test_each_level_is_searched_with_and_without_checkpointing(jobs, run_json, tried):
    found = run_json("max-batch", f"{jobs}:small", "--levels", "L0,L2", "--memory", "1GiB", "--device", "cpu")
    largest = {row["method"]: row["batch"] for row in found["methods"]}
    borders = {"untouched": 40, "L2": 80, "checkpointing": 80, "L2 + checkpointing": 160}
    assert largest.keys() == borders.keys()
    for name, border in borders.items():
        assert border - max(1, border / 12) <= largest[name] <= border
    assert {(attempt.level, attempt.checkpoints) for attempt in tried} == {
        (level, with_it) for level in ("L0", "L2") for with_it in (False, True)
    }
    assert {attempt.memory_bytes for attempt in tried} == {1 << 30}
    assert all(row["samples_per_s"] == pytest.approx(100) for row in found["methods"])
    assert found["methods"][0]["gain"] == 1


def test_a_level_that_measures_is_outlined_without_and_decided_with_measurements(jobs, run_json, monkeypatch):
    """A machine where measurements take a quarter more than a step, and whose sizes have peaks."""
    tries: list[Trial] = []

    def pretend(attempted: Trial, size: int, timeout_s: float) -> Probe:
        tries.append(attempted)
        held = size * (5 if attempted.measures else 4) << 20
        fits = held <= 1 << 30
        return Probe(batch=size, fits=fits, step_s=1.0 if fits else None, peak_bytes=held if fits else None)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{jobs}:small", "--no-checkpoint", "--memory", "1GiB", "--device", "cpu")
    [row] = run_json(*command, "--levels", "L2")["methods"]
    assert 204 * 11 / 12 <= row["batch"] <= 204
    assert sum(attempt.measures for attempt in tries) <= 5
    assert [probe["measures"] for probe in row["tries"]] == [attempt.measures for attempt in tries]
    tries.clear()
    [row] = run_json(*command, "--levels", "untouched")["methods"]  # which has nothing to measure
    assert 256 * 11 / 12 <= row["batch"] <= 256
    assert not any(attempt.measures for attempt in tries)
    assert len(tries) <= 4


def test_a_try_that_was_too_slow_is_not_passed_off_as_too_large(jobs, run, monkeypatch):
    def pretend(trial, size, timeout_s):
        return Probe(batch=size, fits=size <= 40, step_s=1.0, is_late=size > 40)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{jobs}:small", "--levels", "untouched", "--no-checkpoint", "--device", "cpu")
    assert re.search(
        r"\nuntouched: the try of 4\d was too slow, not too large; give more --timeout", run(*command).stdout
    )


@pytest.mark.parametrize(("is_late", "second"), [(True, 46), (False, 86)])
def test_a_whole_try_that_is_too_slow_is_followed_by_one_of_half_the_size(is_late, second):
    sizes: list[int] = []

    def pretend(size: int) -> Probe:
        sizes.append(size)
        return Probe(batch=size, fits=size < 90, step_s=1.0, is_late=is_late)

    confirm(pretend, 1 << 30, [Probe(batch=93, fits=True)])
    assert sizes[:2] == [93, second]


def test_a_table_and_a_plot(jobs, run, tried, tmp_path):
    result = run("max-batch", f"{jobs}:small", "--levels", "L0,L2", "--no-checkpoint", "--device", "cpu",
                 "--output", tmp_path / "plot.html")  # fmt: skip
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["untouched", "L2"]
    assert "2.00 GiB on a CPU" in result.stdout
    assert '"key": "max_batch"' in (tmp_path / "plot.html").read_text()


def test_where_stderr_is_no_terminal_a_line_now_and_then_says_what_it_is_at(jobs, run, tried, monkeypatch):
    command = ("max-batch", f"{jobs}:small", "--levels", "L0,L2", "--no-checkpoint", "--device", "cpu")
    assert run(*command).stderr == ""  # it was over before that
    monkeypatch.setattr(output, "_BETWEEN_LINES_S", 0.0)
    tried.clear()
    lines = run(*command).stderr.splitlines()
    methods = ["untouched" if attempt.level == "L0" else attempt.level for attempt in tried]
    numbers = {"untouched": 1, "L2": 2}
    assert lines == [
        f"0 s: {numbers[method]} of 2, {method}: {attempt.batch}{' with measurements' if attempt.measures else ''}"
        for method, attempt in zip(methods, tried, strict=True)
    ]
    assert run(*command, "--json").stderr == ""


def test_large_numbers_are_written_out(jobs, run, monkeypatch, tmp_path):
    monkeypatch.setattr(
        max_batch, "run_trial", lambda trial, size, timeout_s: Probe(batch=size, fits=size <= 15_000, step_s=0.6134)
    )
    result = run("max-batch", f"{jobs}:small", "--levels", "L0", "--no-checkpoint", "--device", "cpu",
                 "--output", tmp_path / "plot.html")  # fmt: skip
    largest, gain, step, _, speed, _ = result.stdout.splitlines()[1].split()[1:]
    assert 13_000 < int(largest.replace(",", "")) <= 15_000
    assert "," in largest
    assert (gain, step) == ("1.0x", "0.613")
    assert re.fullmatch(r"2\d,\d00", speed)
    assert '"texttemplate": "%{x:,}"' in (tmp_path / "plot.html").read_text()  # 15,000, not 15k


@pytest.mark.parametrize(
    ("option", "value", "seen"),
    [("--sequence", 7, {("batch", 4), ("sequence", 7)}), ("--batch", 7, {("batch", 7), ("sequence", 4)})],
)
def test_the_other_size_is_what_is_looked_for(large, run_json, tried, option, value, seen):
    run_json("max-batch", f"{large}:job", "--levels", "L0", "--no-checkpoint", "--device", "cpu", option, value)
    assert {("batch", tried[0].batch), ("sequence", tried[0].sequence)} == seen


def test_where_nothing_fits_the_reason_is_said_and_the_exit_code_is_1(jobs, run, monkeypatch):
    def pretend(trial, size, timeout_s):
        return Probe(batch=size, fits=False, reason="can't allocate 8 TiB")

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{jobs}:small", "--levels", "L0", "--no-checkpoint", "--device", "cpu")
    result = run(*command)
    assert result.exit_code == 1
    assert "untouched: not even 1 fits: can't allocate 8 TiB" in result.stdout
    assert "Give more --memory" in result.stdout
    found = run(*command, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["methods"][0]["batch"] == 0


def test_an_interrupt_shows_what_is_known_and_names_the_rest(jobs, run, monkeypatch):
    def pretend(trial, size, timeout_s):
        if trial.level == "L2":
            raise KeyboardInterrupt
        return Probe(batch=size, fits=size <= 40, step_s=1.0)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    result = run("max-batch", f"{jobs}:small", "--levels", "L0,L2", "--no-checkpoint", "--device", "cpu")
    assert result.exit_code == 130
    assert "untouched" in result.stdout
    assert result.stderr == "interrupted; not tried to the end: L2\n"
    at_once = run("max-batch", f"{jobs}:small", "--levels", "L2", "--no-checkpoint", "--device", "cpu")
    assert (at_once.exit_code, at_once.stdout, at_once.stderr) == (130, "", "interrupted\n")


def test_a_method_that_fails_does_not_hide_what_was_found_before_it(jobs, run, monkeypatch):
    def pretend(trial, size, timeout_s):
        if trial.checkpoints:
            raise CommandError("Linear has no blocks to checkpoint")
        return Probe(batch=size, fits=size <= 40, step_s=1.0)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{jobs}:small", "--levels", "untouched,L2", "--device", "cpu")
    result = run(*command)
    assert result.exit_code == 2
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["untouched", "L2"]
    assert result.stderr == (
        "error: Linear has no blocks to checkpoint\nnot tried to the end: checkpointing, L2 + checkpointing\n"
    )
    found = json.loads(run(*command, "--json").stdout)
    assert [row["method"] for row in found["methods"]] == ["untouched", "L2"]
    assert found["error"] == "Linear has no blocks to checkpoint"


def test_a_picture_that_cannot_be_drawn_is_said_before_the_search_or_below_what_it_found(
    jobs, run, tried, monkeypatch, tmp_path
):
    command = ("max-batch", f"{jobs}:small", "--levels", "L0", "--no-checkpoint", "--device", "cpu",
               "--output", tmp_path / "plot.png")  # fmt: skip
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    result = run(*command)
    assert (result.exit_code, result.stdout, tried) == (2, "", [])
    assert "drawing a PNG needs `pip install kaleido`" in result.stderr

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no browser")

    monkeypatch.setattr(pictures, "find_spec", lambda name: name)
    monkeypatch.setattr(plotly.graph_objects.Figure, "write_image", refuse)
    result = run(*command)
    assert result.exit_code == 2
    assert result.stdout.splitlines()[1].startswith("untouched")
    assert "Plot:" not in result.stdout
    assert "no browser" in result.stderr
    found = run(*command, "--json")
    assert found.exit_code == 2
    assert "no browser" in json.loads(found.stdout)["plot_error"]


def test_what_libraries_load_in_a_first_step_is_not_counted(jobs):
    """A step of a few KiB fits into 24 MiB, though AdamW alone imports more than that."""
    tried = run_trial(trial(f"{jobs}:small", optimizer="adamw", level="L2", memory_bytes=24 << 20), 1, 120)
    assert tried.fits, tried.reason
    assert tried.peak_bytes < 24 << 20


def test_no_size_above_the_most_is_tried():
    probes = search(lambda size: Probe(batch=size, fits=True), 1 << 30, 4, most=50)
    assert max(probe.batch for probe in probes) == 50
    assert len(probes) == len({probe.batch for probe in probes})


def test_steps_of_different_sequences_are_compared_by_their_tokens(large, run, monkeypatch, tmp_path):
    def pretend(trial, size, timeout_s):
        return Probe(batch=size, fits=size <= 40, step_s=0.5)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{large}:job", "--levels", "L0", "--no-checkpoint", "--device", "cpu", "--batch", 7)
    [row] = json.loads(run(*command, "--json").stdout)["methods"]
    assert row["tokens_per_s"] == 7 * row["sequence"] / 0.5
    result = run(*command, "--output", tmp_path / "plot.html")
    assert result.stdout.splitlines()[0].split()[-2] == "tokens/s"
    assert f"{7 * row['sequence'] / 0.5:g}" in result.stdout.splitlines()[1]
    assert '"tokens/s"' in (tmp_path / "plot.html").read_text()


def test_a_search_that_the_most_has_ended_says_so(jobs, run, monkeypatch):
    def pretend(trial, size, timeout_s):
        return Probe(batch=size, fits=size <= 40 or trial.level == "L2", step_s=1.0)

    monkeypatch.setattr(max_batch, "run_trial", pretend)
    command = ("max-batch", f"{jobs}:small", "--levels", "L0,L2", "--no-checkpoint", "--device", "cpu")
    result = run(*command, "--most", 50)
    assert "\nL2: nothing above --most 50 was tried; more may fit." in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batch", 3, "--sequence", 4), "--sequence and --batch given, expected one of them"),
        (("--memory", "much"), "is no size in bytes"),
        (("--levels", "L9"), "'untouched' is the job without compression"),
        (("--levels", "L3"), "level L3 offloads from a GPU"),
        (("--optimizer", "lion"), "--optimizer is 'lion'"),
        (("--device", "tpu"), "--device is 'tpu'"),
        (("--output", "plot.jpg"), "expected a name that ends in .html or .png"),
        (("--output", "no/plot.html"), "for the plot, expected one that exists"),
        (("--levels", ","), "level is '', expected one of L0"),
        (("--timeout", 0), "--timeout is 0, expected a number of seconds above 0"),
        (("--timeout", "nan"), "--timeout is nan"),
        (("--sequence", 4), "small(4, 4) is not possible: too many positional arguments"),
    ],
)
def test_options_that_cannot_be_used(jobs, run, options, says):
    device = () if "--device" in options else ("--device", "cpu")
    result = run("max-batch", f"{jobs}:small", *device, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def saved_elements(model: nn.Module, x: torch.Tensor) -> int:
    """How many elements autograd keeps of the forward, parameters not counted."""
    kept: list[int] = []
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(0 if tensor.data_ptr() in parameters else tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(kept)


def test_blocks_of_a_module_list_are_checkpointed_and_give_the_same_gradients():
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 8, requires_grad=True)
    model(x).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    before = saved_elements(model, x)
    assert checkpoint_blocks(model)
    assert saved_elements(model, x) < before
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_a_models_own_method_checkpoints_it_and_one_without_blocks_says_so():
    model = nn.Linear(2, 2)
    assert not checkpoint_blocks(model)
    asked = []
    model.gradient_checkpointing_enable = lambda **options: asked.append(options)
    assert checkpoint_blocks(model)
    assert asked == [{"gradient_checkpointing_kwargs": {"use_reentrant": False}}]


@pytest.mark.parametrize(
    "text",
    [
        "torch.OutOfMemoryError: CUDA out of memory.",
        "terminate called: std::bad_alloc",
        "x\nMemoryError\ny",
        "a step of 4 failed: RuntimeError: could not create a primitive\n  jobs.py:11, in forward",
    ],
)
def test_what_says_that_memory_was_too_little(text):
    assert says_out_of_memory(text)
    assert not says_out_of_memory("RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert not says_out_of_memory("RuntimeError: could not create a primitive descriptor for a matmul primitive")


STOPPED_IN_THE_SECOND_METHOD = """
import os, time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


def job(batch):
    if (HERE / "tried").exists():
        (HERE / "child.part").write_text(str(os.getpid()))
        (HERE / "child.part").rename(HERE / "child")
        time.sleep(600)
    (HERE / "tried").touch()
    return nn.Linear(4, 1), torch.zeros(batch, 4), lambda batch: model_of(batch)


def model_of(batch):
    return (batch * torch.ones(4, requires_grad=True)).sum()
"""


def test_sigterm_shows_what_is_known_and_leaves_no_process(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED_IN_THE_SECOND_METHOD)
    options = ("--levels", "untouched,L1", "--no-checkpoint", "--most", "1", "--device", "cpu", "--json")
    command = [sys.executable, "-m", "_gact_dist_command", "max-batch", "stopped.py:job", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **streams) as running:
        child = tmp_path / "child"
        while not child.exists() and running.poll() is None:
            time.sleep(0.05)
        running.terminate()
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM, stderr
    assert [row["method"] for row in json.loads(stdout)["methods"]] == ["untouched"]
    assert stderr == "interrupted; not tried to the end: L1\n"
    assert not Path("/proc", child.read_text()).exists()
