"""gact-dist plan, and attach() with what it wrote."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import gact_dist
from gact_dist import Config
from gact_dist.cli.loading import load_job


@pytest.fixture
def plan_file(jobs, run_json, tmp_path):
    """A plan of 3 bits for jobs.py:small."""
    path = tmp_path / "plan.json"
    run_json("plan", f"{jobs}:small", "--bits", 3, "--output", path)
    return path


@pytest.mark.parametrize("function", ["small", "as_mapping", "with_loss"])
def test_a_plan_of_a_job_in_each_form(jobs, run_json, tmp_path, function):
    found = run_json("plan", f"{jobs}:{function}", "--bits", 3, "--output", tmp_path / "plan.json")
    assert found["tensors"] > 5
    assert found["average_bits"] <= 3
    assert found["exact_bytes"] > 3 * found["retained_bytes"]
    assert [layer["name"] for layer in found["layers"]][:3] == ["layers.0", "layers.1", "layers.2"]
    assert sum(layer["exact_bytes"] for layer in found["layers"]) == pytest.approx(found["exact_bytes"], abs=10)


def test_the_table_names_layers_and_the_line_to_write(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:small", "--bits", 2.5, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0
    assert "layers.2" in result.stdout
    assert f'Config(bits=2.5, plan_file="{tmp_path}/plan.json")' in result.stdout


def test_a_budget_in_bytes_and_one_in_error(jobs, run_json, tmp_path):
    wide = run_json("plan", f"{jobs}:small", "--retained-bytes", "30KiB", "-o", tmp_path / "a.json")
    assert wide["retained_bytes"] <= 30 * 1024
    bounded = run_json("plan", f"{jobs}:small", "--error", 0.1, "-o", tmp_path / "b.json")
    config = Config(policy="acgc", error=0.1, plan_file=str(tmp_path / "b.json"))
    gact = gact_dist.attach(load_job(f"{jobs}:small").model, config=config)
    assert len(gact.plan) == bounded["tensors"]


def test_attach_begins_with_the_plan_and_keeps_it(jobs, plan_file, caplog):
    job = load_job(f"{jobs}:small")
    gact = gact_dist.attach(job.model, config=Config(bits=3, plan_file=str(plan_file), watch_interval=0))
    planned = json.loads(plan_file.read_text())["state"]["plan"]
    assert gact.plan == planned
    for _ in range(3):
        with gact.step(job.loss_fn, job.batch):
            loss = job.loss_fn(job.batch)
        loss.backward()
    assert gact.plan == planned
    assert gact.history == []  # no adaptation until adapt_interval
    assert {row.name: row.bits for row in gact.report().rows if row.codec == "quantised"}.items() <= planned.items()
    assert caplog.records == []


def test_the_next_adaptation_comes_after_the_interval_of_the_run(jobs, plan_file):
    job = load_job(f"{jobs}:small")
    gact = gact_dist.attach(job.model, config=Config(bits=3, plan_file=str(plan_file), adapt_interval=2))
    for _ in range(3):
        with gact.step(job.loss_fn, job.batch):
            loss = job.loss_fn(job.batch)
        loss.backward()
    assert [entry["step"] for entry in gact.history] == [2]


def test_save_plan_writes_what_another_controller_reads(jobs, tmp_path):
    job = load_job(f"{jobs}:small")
    first = gact_dist.attach(job.model, config=Config(bits=2))
    first.calibrate(job.loss_fn, job.batch)
    first.save_plan(str(tmp_path / "plan.json"))
    first.detach()
    second = gact_dist.attach(job.model, config=Config(bits=2, plan_file=str(tmp_path / "plan.json")))
    assert second.plan == first.plan != {}


def test_a_plan_for_another_model_is_refused(jobs, plan_file):
    with pytest.raises(ValueError, match=r"is of another model: of the \d+ tensors .* none is in a module of this one"):
        gact_dist.attach(load_job(f"{jobs}:other").model, config=Config(bits=3, plan_file=str(plan_file)))


def test_a_plan_that_fits_in_part_is_a_warning(jobs, plan_file, caplog):
    model = load_job(f"{jobs}:small").model
    model.layers = model.layers[:2]
    with caplog.at_level(logging.WARNING):
        gact_dist.attach(model, config=Config(bits=3, plan_file=str(plan_file)))
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"plan_file {plan_file} has bits for 6 tensors, of which 4 are in modules of this model"
    ]


def test_a_plan_whose_names_have_moved_is_a_warning_after_the_first_step(jobs, plan_file, caplog):
    content = json.loads(plan_file.read_text())
    content["state"]["plan"] = {f"{name}9": bits for name, bits in content["state"]["plan"].items()}
    plan_file.write_text(json.dumps(content))
    job = load_job(f"{jobs}:small")
    gact = gact_dist.attach(job.model, config=Config(bits=3, plan_file=str(plan_file)))
    with gact.step():
        job.loss_fn(job.batch)
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        f"plan_file {plan_file} has bits for 6 tensors, of which the first step saved 0"
    ]


def test_a_plan_for_another_budget_is_a_warning(jobs, plan_file, caplog):
    gact_dist.attach(load_job(f"{jobs}:small").model, config=Config(bits=4, plan_file=str(plan_file)))
    assert "was made for bits=3.0" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "holds no plan"),
        ("[]", "holds no plan"),
        ('{"format": "gact_dist plan", "version": 1}', "holds no plan"),
        ('{"format": "gact_dist plan", "version": 99, "state": {}}', "has version 99"),
        ('{"format": "gact_dist plan", "version": 1, "state": {"step": 0, "plan": {"a": 77}}}', "cannot be used"),
    ],
)
def test_what_is_no_plan_is_one_error(tmp_path, content, says):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=says):
        gact_dist.attach(torch.nn.Linear(2, 2), config=Config(plan_file=str(path)))


def test_a_plan_file_needs_a_policy_that_chooses_bits():
    with pytest.raises(ValueError, match="plan_file was given and policy is 'uniform'"):
        Config(policy="uniform", plan_file="plan.json")
    with pytest.raises(TypeError, match="plan_file is 3"):
        Config(plan_file=3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "no budget given, expected one of --bits, --retained-bytes and --error"),
        (("--bits", 3, "--error", 0.1), "--bits and --error given"),
        (("--bits", 30), "bits is 30.0, expected a number from 1 to 8"),
        (("--retained-bytes", "lots"), "'lots' is no size in bytes"),
    ],
)
def test_budgets_that_cannot_be_used(jobs, run, tmp_path, options, says):
    result = run("plan", f"{jobs}:small", "-o", tmp_path / "plan.json", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_a_model_that_gives_nothing_to_measure(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:frozen", "--bits", 3, "-o", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert not (tmp_path / "plan.json").exists()


def test_a_job_whose_tensors_are_all_too_small_says_so(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:of_small_tensors", "--bits", 4, "--output", tmp_path / "plan.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "each has fewer than 1024 elements or has to stay exact; give a larger batch" in result.stderr
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(("name", "says"), [("no/plan.json", "there is no folder"), ("", "is a folder, expected")])
def test_a_file_that_cannot_be_written_is_said_before_the_model_is_built(jobs, run, tmp_path, name, says):
    result = run("plan", f"{jobs}:raises", "--bits", 3, "-o", tmp_path / name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr
    assert "FileNotFoundError" not in result.stderr


def test_what_the_package_refuses_is_said_without_the_name_of_a_class(jobs, run, tmp_path):
    result = run("plan", f"{jobs}:small", "--retained-bytes", 1, "-o", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "measuring failed: retained_bytes is 1, but a step keeps at least" in result.stderr
