"""What a pipeline schedule runs on a stage that is no microbatch of the job."""

from __future__ import annotations

import torch
from messages import Messages
from modes import STEPS, Cell, Pipeline, adamw, batch_of

from gact_dist import Config

CONFIG = Config(bits=4, adapt_interval=2, calibration_samples=4, min_numel=16, adapt_tolerance=0.0)


def _follow(checkpoint):
    """(steps that were counted, plan, losses, warnings) of a job whose uninitialised memory is full of NaN."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    try:
        with Messages() as warnings:
            job = Pipeline(Cell("PP", checkpoint, "fp32", "eager"), adamw)
            gact = job.attach(CONFIG)
            torch.manual_seed(7)
            losses = []
            for step in range(STEPS):
                losses.append(float(job.forward_backward(*batch_of(step, 0)).detach()))
                job.update()
            gact.detach()
        return gact._schedule.step, gact.plan, losses, warnings.texts
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_stage_that_learns_shapes_on_uninitialised_memory_takes_no_step(ranks):
    for counted, plan, _, warnings in ranks(_follow, "none"):
        assert counted == STEPS * Pipeline.microbatches
        assert plan
        assert warnings == []


def test_two_runs_of_a_pipeline_that_adapts_are_the_same(ranks):
    first, second = ranks(_follow, "non-reentrant"), ranks(_follow, "non-reentrant")
    assert first == second
