"""bench_adaptation.py at tiny sizes: its multiples are those of the steps that it timed."""

from __future__ import annotations

import json

from benchmarks.adaptation import bench_adaptation
from benchmarks.adaptation.bench_adaptation import INTERVAL, Case, Round, main, measure, measure_first, measure_gact

TINY = Case(1, 2, 8)
PERIOD = INTERVAL + 1
"""steps from the end of one adaptation of it to the end of the next, which measures in one and compares in another"""


def test_an_adaptation_over_several_steps_is_summed_and_its_longest_step_taken_whole():
    found = Round(plain_s=[2.0, 2.0, 9.0], compressed_s=[3.0, 4.0, 3.0], adapting_s=[5.0, 10.0, 3.0])
    assert found.total_steps == 4.0  # 2 + 6 + 0 seconds more than the compressed steps beside them
    assert found.longest_step_steps == 5.0


def test_a_round_holds_one_adaptation_and_the_untouched_steps_run_as_often(monkeypatch):
    """Seconds are made up: the number of the call, which is one for each of the three jobs in turn."""
    calls = []

    def seconds(action) -> float:
        action()
        calls.append(action)
        return 1.0 if len(calls) % 3 else (31.0 if len(calls) // 3 % PERIOD == 0 else 1.0)

    monkeypatch.setattr(bench_adaptation, "seconds", seconds)
    row = measure(TINY, rounds=2)
    # the first adaptation ends in the first step; each of the following in the last step of its period
    assert len(calls) == 3 * (1 + 2 * PERIOD)
    assert (row.plain_step_s, row.compressed_step_s, row.total_steps, row.longest_step_steps) == (1.0, 1.0, 30.0, 31.0)
    assert row.compressible_tensors > 5


def test_of_the_first_adaptation_each_round_has_a_new_model(monkeypatch):
    seconds = iter([1.0, 1.0, 1.0, *[2.0, 3.0, 9.0], *[2.0, 3.0, 11.0], *[2.0, 3.0, 13.0]])
    monkeypatch.setattr(bench_adaptation, "seconds", lambda action: action() or next(seconds))
    row = measure_first(TINY, rounds=3)  # which ends in the first step
    assert (row.plain_step_s, row.compressed_step_s, row.total_steps, row.longest_step_steps) == (2.0, 3.0, 4.0, 5.5)
    assert next(seconds, None) is None


def test_gacts_procedure_takes_its_passes_once_for_each_tensor(monkeypatch):
    def seconds(action) -> float:
        """What GACT's procedure returns is a sensitivity; a training step returns nothing."""
        return 2.0 if action() is None else 6.0

    monkeypatch.setattr(bench_adaptation, "seconds", seconds)
    for row in measure_gact(TINY, 1, tensors=7):
        assert (row.plain_step_s, row.total_steps, row.longest_step_steps) == (2.0, 21.0, 22.0)


def test_the_script_writes_every_case_and_gacts_procedure_beside_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_adaptation, "CASES", (TINY, Case(1, 1, 16)))
    monkeypatch.setattr(bench_adaptation, "GACT_CASE", TINY)
    monkeypatch.setattr(bench_adaptation, "LONG_CASES", (TINY,))
    monkeypatch.setattr(bench_adaptation.torch, "set_num_threads", lambda threads: None)
    path = tmp_path / "new" / "adaptation.json"
    main(["--rounds", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [
        (2, "one pass"),
        (2, "one pass, first adaptation"),
        (2, "GACT, whole batch"),
        (2, "GACT, 8 examples"),
        (1, "one pass"),
    ]
    assert rows[0]["total_steps"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
