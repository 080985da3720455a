"""transformers' Trainer under torchrun, a loop that is not ours: two added lines, exact codecs bitwise, real bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LEVELS = ("off", "exact", "L2")


@pytest.mark.parametrize("kind", ["plain", "gradient_checkpointing", "zero_3"])
def test_a_trainer_script_with_two_more_lines(tmp_path, kind):
    script = Path(__file__).with_name("trainer_job.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    arguments = [str(tmp_path), kind, *LEVELS]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    off, exact, rounded = (json.loads((tmp_path / f"{level}.json").read_text()) for level in LEVELS)
    assert exact["weights"] == off["weights"]
    assert exact["plan"] == 0
    assert rounded["weights"] != off["weights"]
    assert rounded["plan"] >= rounded["quantised"] > 2
    assert rounded["ratio"] > 4
