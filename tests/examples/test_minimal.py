"""The minimal examples: short enough to copy, and each trains and compresses on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from script_ranks import run_script

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINIMAL = sorted(path.name for path in EXAMPLES.glob("minimal_*.py"))
LONGEST_LINES = 40


def test_there_is_an_example_for_each_framework():
    assert [f"minimal_{name}.py" for name in ("checkpoint", "ddp", "deepspeed", "fsdp2")] == MINIMAL


@pytest.mark.parametrize("name", MINIMAL)
def test_a_minimal_example_is_short_and_says_how_to_launch_it(name):
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= LONGEST_LINES
    assert f" examples/{name}" in text.split('"""')[1]


@pytest.mark.parametrize("name", MINIMAL)
def test_a_minimal_example_trains_and_compresses(name):
    output = run_script(EXAMPLES / name)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.+)$", output, re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]  # they fall by a third or more
    assert float(re.findall(r"ratio (\S+)$", output.strip())[0]) > 2
