"""Slices of benchmarks/reliability: what is stored exactly comes back unchanged, and faults leave nothing alive."""

from __future__ import annotations

import warnings

import hypothesis

from benchmarks.reliability import endurance, fuzz_saved_tensors


def test_random_programs_are_bitwise_the_untouched_ones():
    tally = fuzz_saved_tensors.Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_saved_tensors.run_batch(0, 300, tally)
    assert tally.differences == []
    assert tally.counts["cases"] == 300


def test_a_fault_of_a_codec_is_found(monkeypatch):
    """The same programs find one when a view's place in the memory that holds it is lost."""
    monkeypatch.setattr(
        "gact_dist.hooks.handles.View.within",
        lambda self, base: base.as_strided(self.size, self.stride, base.storage_offset()),
    )
    tally = fuzz_saved_tensors.Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuzz_saved_tensors.run_batch(0, 2000, tally, (hypothesis.Phase.generate,))
    assert len(tally.differences) == 1


def test_faults_in_a_long_job_leave_nothing_alive():
    run = endurance.Run()
    run.steps(len(run.jobs) * len(endurance.CYCLE) * 4)
    assert len(run.alive) == 4
    early, late = run.alive[2:]  # when each job has kept as many graphs as it ever will
    assert (late.descriptors, late.threads) == (early.descriptors, early.threads)
    # an adaptation that is due in the next step holds a few tensors until then
    assert abs(late.tensors - early.tensors) <= 8
    assert abs(late.objects - early.objects) <= 8
    assert run.adaptations > 20
