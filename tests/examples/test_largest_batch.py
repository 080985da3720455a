"""The example that looks for the largest batch: its search, and one measurement of each kind."""

from __future__ import annotations

from examples import largest_batch


def test_the_largest_batch_is_found_where_its_peak_is_just_below_the_limit(monkeypatch):
    def measured(method: str, batch: int) -> dict[str, float]:
        # small batches have the same peak, as where a step that adapts is the highest
        return {"peak_mb": 20 + 3.0 * max(batch, 16), "step_cpu_s": 0.01 * batch, "retained_mb": 2.0 * batch}

    monkeypatch.setattr(largest_batch, "in_a_process", measured)
    name, batch, peak_mb, retained_mb, cpu_ms = largest_batch.largest("L2", [8, 16], 150).strip("| ").split(" | ")
    assert 0.93 * 150 <= float(peak_mb) <= 150
    assert (name, int(cpu_ms)) == ("L2", 10)
    assert float(peak_mb) == 20 + 3 * int(batch)
    assert float(retained_mb) == 2 * int(batch)


def test_a_method_of_which_nothing_fits_has_an_empty_row(monkeypatch):
    monkeypatch.setattr(largest_batch, "in_a_process", lambda method, batch: {"peak_mb": 100.0 + batch})
    assert largest_batch.largest("L2", [8, 32], 50) == "| L2 | none | | | |"


def test_a_measurement_counts_more_in_the_peak_than_is_retained():
    found = largest_batch.in_a_process("checkpointing + L2", 2)
    # weights and AdamW's two moments of 1.6 million parameters are in the peak alone
    assert found["peak_mb"] > found["retained_mb"] + 12 * 1.6
    assert found["retained_mb"] > 0
    assert found["step_cpu_s"] > 0
