"""benchmarks/fidelity: one cell of each kind on a small language model, and what its tables say of known numbers."""

from __future__ import annotations

import functools
import json

import pytest

from benchmarks.fidelity import report, run
from benchmarks.fidelity.claims import claims
from examples.train import data
from examples.train.config import UsageError

SMALL = (
    "steps=3", "train_examples=64", "batch_size=8", "test_examples=32",
    "layers=1", "hidden_size=16", "adapt_interval=2",
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """One small model and a setting of each policy; skips where setup did not fetch the data."""
    try:
        data.require("language")
    except UsageError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(data, "read_characters", functools.cache(data.read_characters))
    chosen = (run.UNTOUCHED, "uniform 4", "gact 2", "actnn 2", report.STORED, report.IN_BYTES_OF_STORED, "acgc 0.25")
    monkeypatch.setattr(run, "MODELS", {"language": SMALL})
    # what is derived leaves bits to what is stored, and where most of these have one bit the prediction is too high
    stored = {"gact 2": {"derive": False}, "acgc 0.25": {"derive": False}}
    monkeypatch.setattr(run, "SETTINGS", {name: run.SETTINGS[name] | stored.get(name, {}) for name in chosen})
    monkeypatch.setattr(run, "UNIFORM", (2, 4))
    monkeypatch.setattr(run, "SAME_BYTES", (4,))
    monkeypatch.setattr(run, "STORED_BITS", {"language": (4,)})
    monkeypatch.setattr(run, "LESS_BYTES", 0.9)  # most of so small a model are masks and statistics
    monkeypatch.setattr(run, "BATCHES", 1)


@pytest.mark.large
def test_every_cell_is_measured_written_and_not_repeated(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "found.json"
    run.main(["--json", str(path), "--seeds", "1"])
    held = json.loads(path.read_text())
    runs = {row["setting"]: row for row in held["runs"]}
    assert list(runs) == list(run.SETTINGS)
    for setting in ("uniform 4", "gact 2", "actnn 2", "acgc 0.25"):
        assert [moment["step"] for moment in runs[setting]["moments"]] == [1, 3]
        # three draws of a squared norm over hundreds of dimensions and a prediction from one probe, both within 0.2
        last = runs[setting]["moments"][-1]
        assert last["predicted"] == pytest.approx(last["measured"], rel=0.6)
    assert runs["uniform 4"]["average_bits"] == 4
    assert runs["gact 2"]["average_bits"] <= 2
    assert runs[report.IN_BYTES_OF_STORED]["retained_bytes"] <= runs[report.STORED]["retained_bytes"]
    assert runs[report.IN_BYTES_OF_STORED]["average_bits"] > runs[report.STORED]["average_bits"]
    compared = {(row["setting"], row["step"]): row for row in held["comparisons"]}
    for step in (1, 3):
        adaptive, uniform = compared["gact in the bytes of uniform 4", step], compared["uniform 4", step]
        assert adaptive["retained_bytes"] <= uniform["retained_bytes"]
        assert adaptive["measured"] < uniform["measured"]
        stored, derived = compared["stored 4", step], compared["derived in fewer bytes than stored 4", step]
        assert derived["retained_bytes"] <= run.LESS_BYTES * stored["retained_bytes"]
        assert derived["measured"] == pytest.approx(derived["predicted"], rel=0.6)
        assert compared["acgc 0.25", step]["measured"] <= 0.25

    def no_more(*_):
        raise AssertionError("a cell that is in the file ran again")

    monkeypatch.setattr(run, "trained", no_more)
    run.main(["--json", str(path), "--seeds", "1", "--plot"])
    run.main(["--json", str(path), "--seeds", "1"])
    assert json.loads(path.read_text()) == held
    assert {picture.name for picture in tmp_path.glob("*.png")} == {
        "found_accuracy.png", "found_variance.png", "found_error_bound.png"
    }  # fmt: skip
    written = (tmp_path / "found.md").read_text()
    assert written in capsys.readouterr().out
    assert "| gact 2 |" in written
    assert "| less variance than uniform 4 in its bytes, at the least | language |" in written


def _run(setting, seed, accuracy, measured=0.1):
    noise = {"step": 1, "measured": measured, "predicted": 0.1}
    sizes = {"average_bits": 2.0, "exact_bytes": 800, "retained_bytes": 100, "history": []}
    reached = {"accuracy": accuracy, "test_loss": 1 - accuracy}
    return {"model": "m", "setting": setting, "seed": seed, "moments": [noise]} | reached | sizes


def test_differences_are_of_one_seed_and_marked_beyond_the_untouched_jobs_own():
    untouched = [_run(report.UNTOUCHED, seed, accuracy) for seed, accuracy in enumerate((0.80, 0.82, 0.84))]
    close = [_run("uniform 8", seed, accuracy) for seed, accuracy in enumerate((0.79, 0.81, 0.83))]
    worse = [_run("uniform 2", seed, accuracy) for seed, accuracy in enumerate((0.76, 0.82, 0.76))]
    alone = [_run("uniform 4", 5, 0.99)]  # no untouched run of this seed to compare with
    table = report.model_table("m", untouched + close + worse + alone)
    assert "82 (deviation 2) % accuracy" in table
    assert "| uniform 8 | -1.00 | +0.0100 | 2.00 | 0.0001 | 8.0 | 0.1 | 0.1 |" in table
    assert "| uniform 2 | -4.00 * | +0.0400 * |" in table
    assert "uniform 4" not in table
    for row in untouched + close:
        row["date"] = "2026-11-26"
    for row in worse:
        row["date"] = "2026-11-22"
    table = report.model_table("m", untouched + close + worse)
    assert table.endswith("\n\n2026-11-22: uniform 2; 2026-11-26: untouched, uniform 8.")


def test_acgc_is_held_to_its_error_and_to_the_narrowest_uniform_width_that_keeps_it():
    def compared(setting, measured, retained_bytes):
        where = {"model": "m", "seed": 0, "step": 1}
        return {"setting": setting, "measured": measured, "retained_bytes": retained_bytes} | where

    comparisons = [
        compared("uniform 1", 0.3, 50),
        compared("uniform 2", 0.2, 100),
        compared("uniform 3", 0.1, 150),
        compared("gact in the bytes of uniform 2", 0.05, 99),
        compared("acgc 0.25", 0.24, 80),
    ]
    runs = [_run("acgc 0.25", 0, 0.8, measured=0.2), _run("acgc 0.25", 1, 0.8, measured=0.4)]
    table = report.error_bound_table({"runs": runs, "comparisons": comparisons})
    assert "| m | 0.25 | 0.3 (0.4) | 1 of 2 | 2.00 | 1 of 1 | 0.80 (0.80 to 0.80) | 2 |" in table
    assert report.gains_in_same_bytes(comparisons, 2) == [("m", pytest.approx(4.0))]


def test_claims_hold_by_the_worst_of_the_points_and_by_the_mean_over_seeds():
    def compared(setting, measured, retained_bytes):
        where = {"model": "image", "seed": 0, "step": 1}
        return {"setting": setting, "measured": measured, "retained_bytes": retained_bytes} | where

    runs = [
        *(_run(report.UNTOUCHED, seed, accuracy) for seed, accuracy in enumerate((0.80, 0.82, 0.84))),
        *(_run("gact 4", seed, accuracy) for seed, accuracy in enumerate((0.79, 0.80, 0.82))),
        *(_run("actnn 2", seed, accuracy) for seed, accuracy in enumerate((0.79, 0.81, 0.83))),
        *(_run("acgc 0.25", seed, 0.8, measured) for seed, measured in enumerate((0.1, 0.2, 0.4))),
    ]
    comparisons = [
        compared("uniform 2", 0.2, 100),
        compared("gact in the bytes of uniform 2", 0.25, 99),
        compared("acgc 0.25", 0.24, 110),
    ]
    runs += [_run(report.IN_BYTES_OF_STORED, seed, accuracy) for seed, accuracy in enumerate((0.80, 0.82, 0.83))]
    for row in runs:
        row["model"] = "image"
    found = [(claim.text.split()[0], claim.found, claim.holds) for claim in claims(
        {"runs": runs, "comparisons": comparisons}, (2, 3)
    )]  # fmt: skip
    assert found == [
        ("accuracy", "-1.67", True),  # untouched: a deviation of two points
        ("test", "+0.0167", True),
        ("accuracy", "-1.00", False),  # half a point was allowed
        ("ratio", "8.0", False),
        ("accuracy", "-0.33", True),  # in the bytes of a run that derives nothing
        ("increase", "0.233", True),  # the mean
        ("increase", "0.4", False),  # the worst moment
        ("bytes", "1.1", False),
        ("less", "0.8 times", False),
    ]


def test_fewer_bytes_are_claimed_by_the_mean_over_the_points():
    def compared(setting, step, measured):
        return {"setting": setting, "measured": measured, "model": "text", "seed": 0, "step": step}

    comparisons = [
        compared("stored 4", 1, 0.1), compared("derived in fewer bytes than stored 4", 1, 0.2),
        compared("stored 4", 3, 0.1), compared("derived in fewer bytes than stored 4", 3, 0.1),
    ]  # fmt: skip
    held = {"runs": [_run(report.UNTOUCHED, 0, 0.8) | {"model": "text"}], "comparisons": comparisons}
    (claim,) = claims(held, (2,))
    assert (claim.found, claim.holds) == ("1.41", False)
    assert "| text | 1.41 (1 to 2) |" in report.fewer_bytes_table(comparisons)
