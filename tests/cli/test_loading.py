"""MODULE:FUNCTION to a job, and one message where that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gact_dist.cli.loading import load_function, load_job
from gact_dist.cli.output import CommandError, bytes_of, shown_bytes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("jobs_of_user.py", "names no function, expected MODULE:FUNCTION"),
        (":small", "names no function"),
        ("nowhere.at_all:small", "there is no module 'nowhere.at_all'"),
        ("json.nothing:small", "there is no module 'json.nothing'"),
        ("json:dumbs", "json has no function 'dumbs', expected one of its own: "),
        ("{folder}/no.py:small", "there is no file"),
        ("{jobs}:smal", "has no function 'smal', expected one of its own: small, as_mapping, "),
        ("{jobs}:a_number", "is of type int, expected a function"),
        (
            "{jobs}:of_two",
            "is not possible: missing a required argument: 'batch'; expected a function that can be called",
        ),
        ("{jobs}:only_a_model", "returned (Net), expected (model, batch) or (model, batch, loss_fn)"),
        ("{jobs}:with_a_name", "returned a str as loss_fn, expected a function"),
        ("{jobs}:raises", "raises() failed: FileNotFoundError: "),
        ("{jobs}:without_loss", "the model returned a tensor of shape (32, 4), expected the loss"),
        ("{jobs}:not_finite", "the loss is nan on this batch, expected a finite one"),
        ("{jobs}:no_loss_fn", "loss_fn(batch) returned a str, expected the loss"),
        ("{jobs}:frozen", "no parameter of the model requires a gradient"),
        (
            "{jobs}:of_another_call",
            "a batch that the forward of Other does not take: too many positional arguments; a mapping",
        ),
        ("{jobs}:of_another_name", "that the forward of Other does not take: missing a required argument: 'x'"),
        ("{jobs}:fails_in_forward", "mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_each_mistake_is_one_message_and_exit_code_2(jobs, run, tmp_path, name, says):
    name = name.format(jobs=jobs, folder=tmp_path)
    result = run("plan", name, "--bits", 3, "-o", tmp_path / "plan.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_of_the_users_code_shows_the_users_line(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:fails_in_forward", "--bits", 3, "-o", tmp_path / "plan.json")
    line = next(number for number, text in enumerate(jobs.read_text().splitlines(), 1) if "x = layer(x)" in text)
    assert f"{jobs}:{line}, in forward: x = layer(x)" in result.stderr


@pytest.mark.parametrize(
    "text",
    ["Torch not compiled with CUDA enabled", "Found no NVIDIA driver on your system.", "No CUDA GPUs are available"],
)
def test_a_job_that_asks_for_a_gpu_that_is_not_there_is_told_what_to_do(tmp_path, run, monkeypatch, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "asks_for_a_gpu.py"
    path.write_text(f"def job():\n    raise RuntimeError({text!r})\n")
    result = run("profile", f"{path}:job")
    assert result.exit_code == 2
    assert text in result.stderr
    assert "torch sees no GPU on this machine, and `gact-dist doctor` says why" in result.stderr


def test_an_error_with_json_is_an_object_on_stdout(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:smal", "--bits", 3, "-o", tmp_path / "plan.json", "--json")
    assert result.exit_code == 2
    assert "has no function 'smal'" in json.loads(result.stdout)["error"]
    assert result.stderr == ""


def test_a_module_of_the_current_folder(jobs, monkeypatch):
    monkeypatch.chdir(jobs.parent)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "jobs_of_user", raising=False)
    assert load_function("jobs_of_user:small").__name__ == "small"


def test_a_module_that_fails_to_import_shows_its_own_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import json\n\nraise OSError('no data here')\n")
    with pytest.raises(CommandError, match=r"importing .*broken.py failed: OSError: no data here\n  .*broken.py:3"):
        load_function(f"{path}:small")


def test_arguments_go_to_the_function(jobs):
    assert load_job(f"{jobs}:small", 5).batch[0].shape == (5, 64)


def test_the_loss_of_an_output_with_one(jobs, monkeypatch):
    job = load_job(f"{jobs}:other")
    whole = job.model.forward
    for output in (
        lambda x: {"loss": whole(x)},
        lambda x: (whole(x), x),
        lambda x: type("Output", (), {"loss": whole(x)})(),
    ):
        monkeypatch.setattr(job.model, "forward", output)
        assert torch.equal(job.loss_fn(job.batch), whole(job.batch))


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("1000000", 10**6), ("4k", 4000), ("3b", 3)],
)
def test_sizes_as_people_write_them(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2 giga", "1.2.3", "GiB"])
def test_what_is_no_size(text):
    with pytest.raises(CommandError, match="is no size in bytes"):
        bytes_of(text)


def test_sizes_are_shown_in_the_unit_that_fits():
    assert [shown_bytes(size) for size in (512, 2048, 3 << 20, 150 << 30)] == [
        "512 bytes",
        "2.00 KiB",
        "3.00 MiB",
        "150 GiB",
    ]


@pytest.mark.parametrize("command", [("profile",), ("plan", "--bits", "4", "--output", "plan.json")])
def test_what_the_job_prints_is_not_among_the_json(jobs, tmp_path, command):
    name, *options = command
    call = [sys.executable, "-m", "gact_dist.cli.main", name, f"{jobs}:talks", *options, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert done.stderr.count("a line of the job's own\n") >= 1
    assert done.stderr.count("a line of a program that it starts\n") >= 1


def test_what_the_job_prints_is_not_among_the_json_where_stdout_is_no_file(jobs, run):
    result = run("profile", f"{jobs}:talks", "--fake", "--level", "untouched", "--json")
    assert json.loads(result.stdout)["levels"]
    assert "a line of the job's own" in result.stderr
