"""DistributedDataParallel jobs are bitwise what they are without gact_dist, but for the rounding of stored tensors."""

from __future__ import annotations

import pytest
import torch
from ddp_jobs import Job, Session, batch_of, differences, train
from exact_codecs import store_exactly
from ranks import count_collectives

from gact_dist import Config

EXACT = Config.from_level("exact")
ADAPTIVE = Config.from_level(
    "L2", adapt_interval=2, adapt_tolerance=0, calibration_samples=4, min_numel=16, watch_interval=0
)
UNIFORM = Config.from_level("L1", min_numel=16, watch_interval=0)
# one all_reduce to learn that no rank failed, one of what each rank saw, one all_gather of name digests and one
# all_reduce of the gradients' errors
COMPARISON_COLLECTIVES = 4
# one all_reduce to learn that no rank failed, one all_gather of name digests and one all_reduce of statistics, then the
# comparison, and one all_gather of plan digests
CALIBRATION_COLLECTIVES = 4 + COMPARISON_COLLECTIVES
# before them one all_reduce to learn whether any rank's steps are long
ADAPTATION_COLLECTIVES = 1 + CALIBRATION_COLLECTIVES
# in the first one, one all_reduce more to learn whether the first forward has shown that, and one to learn that no rank
# failed where they found what need not be stored
FIRST_COLLECTIVES = 2
# ranks that saw different tensors exchange the names as well, and all_gather_object is two all_gathers
NAMES_COLLECTIVES = 2

JOBS = {
    "gpt": Job(kind="gpt"),
    "gpt-attached-before-wrapping": Job(kind="gpt", attach_to="plain"),
    "gpt-no-sync": Job(kind="gpt", micro_batches=3, steps=3),
    "gpt-static-graph": Job(kind="gpt", ddp={"static_graph": True}),
    "gpt-bucket-views": Job(kind="gpt", ddp={"gradient_as_bucket_view": True}, micro_batches=2, steps=3),
    "cnn": Job(kind="cnn"),
    "cnn-attached-before-wrapping": Job(kind="cnn", attach_to="plain"),
    "cnn-no-sync": Job(kind="cnn", micro_batches=2, steps=3),
    "cnn-static-graph": Job(kind="cnn", ddp={"static_graph": True}, attach_to="plain"),
    "branching-find-unused": Job(kind="branching", ddp={"find_unused_parameters": True}),
    "branching-find-unused-no-sync": Job(
        kind="branching", ddp={"find_unused_parameters": True}, micro_batches=2, steps=3
    ),
}


def compared(job, config, exactly):
    """(differences from the untouched job, collectives of both, steps that adapted) on this rank."""
    untouched = train(job, None)
    ours = train(job, config, store_exactly if exactly else None)
    return differences(untouched, ours), untouched.collectives, ours.collectives, ours.adapted, ours.plans


@pytest.mark.parametrize("name", JOBS)
def test_exact_level_is_bitwise_the_untouched_job(ranks, name):
    for found, untouched, ours, adapted, _ in ranks(compared, JOBS[name], EXACT, False):
        assert found == []
        assert ours == untouched
        assert not any(adapted)


@pytest.mark.parametrize("name", JOBS)
def test_adaptation_leaves_the_job_bitwise_untouched(ranks, name):
    job = JOBS[name]
    names_differ = job.kind == "branching"  # its branch is taken on one rank of two
    extra = ADAPTATION_COLLECTIVES + NAMES_COLLECTIVES * names_differ
    for found, untouched, ours, adapted, plans in ranks(compared, job, ADAPTIVE, True):
        assert found == []
        forwards = range(job.steps * job.micro_batches)
        # every second optimizer step; before the first one is seen, every second forward
        due = {0, *range(0, len(forwards), 2 * job.micro_batches), *range(0, job.micro_batches, 2)}
        assert adapted == [forward in due for forward in forwards]
        per_step = [sum(adapted[i : i + job.micro_batches]) for i in range(0, len(adapted), job.micro_batches)]
        added = [extra * times for times in per_step]
        added[0] += FIRST_COLLECTIVES
        assert ours == [count + more for count, more in zip(untouched, added, strict=True)]
        assert any(bits is not None for bits in plans[0].values())  # something was measured and would be compressed


def test_comparison_sees_real_compression(ranks):
    """The tests above could not fail if rounding did not show in the trace."""
    for found, untouched, ours, *_ in ranks(compared, JOBS["gpt"], UNIFORM, False):
        assert "final head.weight" in found
        # a uniform level communicates in its first step alone
        assert ours == [untouched[0] + COMPARISON_COLLECTIVES, *untouched[1:]]


def calibrated_amid_accumulation():
    """What a calibration between backward and optimizer step changes, object by object."""
    session = Session(JOBS["cnn"], ADAPTIVE).run(0, 1)
    model, batch = session.model, batch_of("cnn", 9, 0)
    gradients = [(p.grad, p.grad._version, p.grad.clone()) for p in model.parameters()]
    buffers = [(b, b._version, b.clone()) for b in model.buffers()]
    random_state, mode = torch.get_rng_state(), [m.training for m in model.modules()]
    with count_collectives() as count:
        session.gact.calibrate(session.loss_fn, batch)
    changed = [
        name
        for name, before, now in (
            ("gradient", gradients, [p.grad for p in model.parameters()]),
            ("buffer", buffers, list(model.buffers())),
        )
        for (old, version, value), new in zip(before, now, strict=True)
        if new is not old or new._version != version or not torch.equal(new, value)
    ]
    same_mode = mode == [m.training for m in model.modules()]
    return changed, torch.equal(random_state, torch.get_rng_state()), same_mode, count.total


def test_calibrating_keeps_gradients_buffers_and_random_numbers(ranks):
    for changed, same_random_state, same_mode, collectives in ranks(calibrated_amid_accumulation):
        assert changed == []
        assert same_random_state
        assert same_mode
        assert collectives == CALIBRATION_COLLECTIVES
