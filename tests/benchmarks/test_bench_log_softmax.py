"""bench_log_softmax.py at tiny sizes: its rows and its table."""

from __future__ import annotations

import pytest

from benchmarks.step.bench_log_softmax import METHODS, measure, table

pytest.importorskip("transformers")


def test_it_measures_every_method():
    sizes = {"batch_size": 4, "length": 16, "words": 2048, "layers": 1, "width": 32}
    rows = measure(2, sizes, steps=2, rounds=1)
    assert [row["method"] for row in rows] == [*METHODS]
    _, exact, sampled, again, eighths = rows
    assert exact["ratio"] < sampled["ratio"]
    assert sampled["ratio"] < again["ratio"]
    assert eighths["later_bytes"] < again["later_bytes"]
    assert all(row["worst_bytes"] >= row["later_bytes"] > 0 for row in rows)
    assert len(table({"rows": rows}).splitlines()) == 2 + len(METHODS)
