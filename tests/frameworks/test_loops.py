"""Loops of the user's own, on two ranks: accelerate, one in the manner of torchtitan, PyTorch Geometric."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from example_jobs import EXAMPLES, check, run_example

ROOT = EXAMPLES.parent


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["--accumulate", "2", "--mixed_precision", "bf16"], marks=pytest.mark.large),
    ],
)
def test_accelerate(tmp_path, options):
    jobs = run_example("accelerate_loop.py", tmp_path, "--steps", "6", *options)
    check(jobs, 2.5 if options else 5)
    # the interval is 2 optimizer steps, of which every second forward ends one; the second time the plan was kept
    assert jobs["L2"][0]["adapted_at"] == ([2, 5] if options else [2, 4])


@pytest.mark.large
def test_accelerate_launch(tmp_path):
    """The launcher itself, which only sets variables of the environment."""
    launch = [Path(sys.executable).parent / "accelerate", "launch", "--multi_gpu", "--num_processes=2"]
    launch += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    done = subprocess.run(
        [*launch, EXAMPLES / "accelerate_loop.py", "--steps=3"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gact/retained_bytes") == 3  # the logger of rank 0
    attached = "attached to Sequential: policy gact, 4 bits (float32 that is rounded takes 7.5 times less)"
    assert done.stderr.count(f"{attached}, one plan for 2 ranks") == 1
    assert done.stderr.count("new plan, ") == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--accumulate", "2"],
        pytest.param(["--checkpoint"], marks=pytest.mark.large),
        pytest.param(["--tensor-parallel", "2", "--checkpoint"], marks=pytest.mark.large),
    ],
)
def test_a_loop_in_the_manner_of_torchtitan(tmp_path, options):
    jobs = run_example("torchtitan_like.py", tmp_path, "--steps", "4", *options)
    check(jobs, 5)
    assert jobs["exact"][0]["losses"] == jobs["untouched"][0]["losses"]
    assert jobs["L2"][0]["losses"][0] == jobs["untouched"][0]["losses"][0]


@pytest.mark.parametrize("conv", ["gcn", pytest.param("gat", marks=pytest.mark.large)])
def test_pytorch_geometric(tmp_path, conv):
    jobs = run_example("pyg_graphs.py", tmp_path, "--steps", "4", "--conv", conv)
    check(jobs, 5)
    assert jobs["exact"][0]["losses"] == jobs["untouched"][0]["losses"]
