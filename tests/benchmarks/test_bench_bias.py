"""The bias of rounded gradients is told from their noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gradient.bench_bias import of_groups

GROUPS, DRAWS, SIZE = 8, 16, 4000
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "bias.json"


@pytest.mark.parametrize("bias", [0.0, 0.05])
def test_the_square_of_the_bias_is_found_within_its_standard_error(bias):
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(GROUPS, DRAWS, SIZE, dtype=torch.float64, generator=generator).mean(1) + bias
    found, standard_error = of_groups(means @ means.T)
    assert abs(found - bias**2 * SIZE) < 4 * standard_error
    # what noise alone leaves of a mean of all gradients, without groups
    assert standard_error < SIZE / (GROUPS * DRAWS)


def test_the_results_have_each_model_and_width_with_recipes_and_without():
    rows = json.loads(RESULTS.read_text())["rows"]
    assert len(rows) == 6 * 3 * 2
    assert len({(row["model"], row["bits"], row["derive"]) for row in rows}) == len(rows)
