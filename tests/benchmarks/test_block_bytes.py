"""bench_block_bytes.py: what it counts is what the report says, and what is made again is not stored."""

from __future__ import annotations

import json

import pytest

from benchmarks.step import bench_block_bytes
from benchmarks.step.bench_block_bytes import BLOCKS, main, measure
from gact_dist import Config

GPT = "GPT, no dropout"


def test_the_count_is_the_sum_of_what_a_block_saves():
    """Of an untouched GPT block in bfloat16, in bytes for each token and unit of its width."""
    norms, qkv, projection, mlp = 2 * (2 + 2), 2 * 3, 2, 2 * (4 + 4)  # each norm saves its input, a linear the output
    found = measure(BLOCKS[GPT])["counted"]
    statistics = 4 * (2 + 2 + bench_block_bytes.HEADS) / bench_block_bytes.WIDTH  # mean, rstd and logsumexp, float32
    assert found == pytest.approx(norms + qkv + projection + mlp + statistics, rel=1e-2)


def test_the_count_and_the_report_agree_and_derived_tensors_take_nothing():
    stored = measure(BLOCKS[GPT], Config.from_level("L2", derive=False))
    derived = measure(BLOCKS[GPT], Config.from_level("L2"))
    for row in (stored, derived):
        assert row["report"] == pytest.approx(row["counted"], rel=1e-3)
    assert derived["counted"] < 0.7 * stored["counted"]
    assert derived["variance"] < stored["variance"]


@pytest.mark.large
def test_the_table_has_a_row_for_each_block_and_a_column_for_each_setting(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_block_bytes, "LEVELS", {"L2": 4.0})
    path = tmp_path / "rows.json"
    main(["--blocks", GPT, "--json", str(path)])
    printed = capsys.readouterr().out
    main(["--table", str(path)])
    assert capsys.readouterr().out == printed
    title, _, row = printed.strip().splitlines()
    assert title == "| block | untouched | L2, all stored | L2 | L2, equal variance |"
    assert row.startswith(f"| {GPT} | 32.")
    rows = {found["setting"]: found for found in json.loads(path.read_text())["rows"]}
    assert rows["L2, equal variance"]["bits"] < rows["L2"]["bits"]
    assert rows["L2, equal variance"]["variance"] <= 1.0
