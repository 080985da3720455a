"""gact_dist.deepspeed.initialize on two real ranks: the block, the ready configs, checkpoints on disk."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients import flat_gradient
from modes import SAMPLES, batch_of, loss_of
from ranks import count_collectives
from small_models import TinyGPT
from torch import Tensor, nn

import gact_dist
from gact_dist import distributed
from gact_dist.config import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"adapt_interval": 2, "adapt_tolerance": 0, "calibration_samples": 4, "min_numel": 16}
ERROR = 0.25
KEPT_EXACTLY = gact_dist.Config(min_numel=10**9)  # what goes through the hooks has the names of a step, and no bits
LINEAR = torch.nn.functional.linear


class Checkpointed(TinyGPT):
    """TinyGPT whose blocks run under deepspeed.checkpointing."""

    def forward(self, tokens: Tensor) -> Tensor:
        from deepspeed.runtime.activation_checkpointing import checkpointing

        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x)
        return self.head(self.norm(x))


def ds_config(
    stage: int, block: dict[str, Any] | None, micro_batches: int = 1, offload: bool = False
) -> dict[str, Any]:
    """offload: the optimizer's state and step are on the host."""
    on_host = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | on_host,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    return settings if block is None else settings | {"gact": block}


def start(config: Any, model: Callable[..., nn.Module] = TinyGPT):
    """An engine by the user's call, with everything seeded."""
    os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"] = "cpu", str(dist.get_rank())
    torch.manual_seed(0)
    engine, *rest = gact_dist.deepspeed.initialize(model=model(dropout=0.1), config=config)
    assert len(rest) == 3
    torch.manual_seed(7 + dist.get_rank())
    return engine


def end(engine: Any) -> None:
    """ZeRO-3 leaves its own linear for whatever the process does next."""
    engine.destroy()
    torch.nn.functional.linear = LINEAR


def run(engine: Any, first: int, last: int) -> tuple[list[float], list[int]]:
    """Losses, and collectives a step, of micro-batches first .. last - 1."""
    losses, collectives = [], []
    for number in range(first, last):
        inputs, targets = batch_of(number, dist.get_rank())
        with count_collectives() as count:
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        collectives.append(count.total)
    return losses, collectives


def weights(engine: Any) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    parameters = list(engine.module.parameters())
    whole = [safe_get_full_fp32_param(parameter) for parameter in parameters]
    if None in whole:  # stage 0 in fp32 has no optimizer of DeepSpeed's own
        whole = parameters
    return [parameter.detach().clone() for parameter in whole]


def jobs(stage: int, model: type[nn.Module], micro_batches: int, offload: bool) -> tuple:
    """(losses, weights, collectives) of the untouched, the exact and the compressed job, and the last one's report."""
    found = []
    for block in (None, {"level": "exact"}, {**SMALL}):
        engine = start(ds_config(stage, block, micro_batches, offload), model)
        losses, collectives = run(engine, 0, 4 * micro_batches)
        found.append((losses, weights(engine), collectives))
        adaptation, report = None, None
        if block is None:
            assert not hasattr(engine, "gact")
        else:
            report, adaptation = engine.gact.report(), engine.gact.adaptation
            engine.gact.detach()
        end(engine)
    return *found, report, adaptation


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("stage", "model", "micro_batches", "offload"),
    [
        pytest.param(1, TinyGPT, 1, False, id="1"),
        pytest.param(3, TinyGPT, 1, False, id="3"),
        pytest.param(1, Checkpointed, 1, False, id="1-checkpointing"),
        pytest.param(2, Checkpointed, 1, False, id="2-checkpointing"),
        pytest.param(3, Checkpointed, 1, False, id="3-checkpointing"),
        pytest.param(0, TinyGPT, 3, False, id="0-accumulation"),
        pytest.param(2, TinyGPT, 3, False, id="2-accumulation"),
        pytest.param(3, TinyGPT, 3, False, id="3-accumulation"),
        pytest.param(1, TinyGPT, 1, True, id="1-optimizer-offload"),
        pytest.param(3, TinyGPT, 1, True, id="3-optimizer-offload"),
    ],
)
def test_the_block_alone_compresses_and_exact_is_bitwise(ranks, stage, model, micro_batches, offload):
    for untouched, exact, compressed, report, adaptation in ranks(jobs, stage, model, micro_batches, offload):
        assert exact[0] == untouched[0]
        assert same(exact[1], untouched[1])
        assert exact[2] == untouched[2]
        assert compressed[0] != untouched[0]
        more = compressed[2][0] - untouched[2][0]  # uniform bits first, compared with the exact gradient
        assert more == 4 if stage < 3 else more > 4  # ZeRO-3 gathers parameters for it
        assert adaptation is not None
        assert adaptation.plan
        quantised = [row for row in report.rows if row.codec == "quantised"]
        assert len(quantised) > 2
        if model is Checkpointed:
            inputs = [row.shape for row in quantised if row.name.startswith(":BlockInput")]
            assert inputs == [(SAMPLES, 40, 64)] * 2
        assert report.ratio > 5


def checkpoint_around_a_step() -> tuple[list[bool], bool, list[str]]:
    """(whether DeepSpeed's checkpoint is its own before, in and after a step, whether a backward after the step has
    the gradients of the untouched model, names of the report)."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import CheckpointFunction

    original = dict(vars(CheckpointFunction))
    (inputs, targets), model, own = batch_of(0, 0), Checkpointed(), []

    def note() -> None:
        own.append(dict(vars(CheckpointFunction)) == original)

    loss_of(model(inputs), targets).backward()
    untouched = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    gact = gact_dist.attach(model, config=KEPT_EXACTLY)
    note()
    with gact.step():
        note()
        loss = loss_of(model(inputs), targets)
    note()
    names = [row.name for row in gact.report().rows]
    loss.backward()
    return own, same([parameter.grad for parameter in model.parameters()], untouched), names


def test_the_patch_of_deepspeeds_checkpoint_ends_with_the_step_and_backward_needs_none(ranks):
    for own, equal, names in ranks(checkpoint_around_a_step):
        assert own == [True, False, True]
        assert equal
        assert len([name for name in names if name.startswith(":BlockInput")]) == 2


def offers_that_overlap() -> tuple[bool, bool]:
    """Whether DeepSpeed's checkpoint is its own once the first of two contexts has ended, and once both have."""
    from deepspeed.runtime.activation_checkpointing.checkpointing import CheckpointFunction

    original = dict(vars(CheckpointFunction))
    first, second = (distributed.checkpoints_offering_inputs(pack) for pack in (id, hash))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    within = dict(vars(CheckpointFunction)) == original
    second.__exit__(None, None, None)
    return within, dict(vars(CheckpointFunction)) == original


def test_contexts_of_two_threads_may_end_in_any_order(ranks):
    assert ranks(offers_that_overlap) == [(False, True)] * 2


def partitioned_by_deepspeed(setting: str) -> bool:
    """Whether a step leaves the inputs of blocks to DeepSpeed where that stores them in a way of its own."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    gact = gact_dist.attach(Checkpointed(), config=KEPT_EXACTLY)
    before = getattr(checkpointing, setting)
    setattr(checkpointing, setting, True)
    try:
        inputs, targets = batch_of(0, 0)
        with gact.step():
            loss = loss_of(gact._schedule.model(inputs), targets)
    finally:
        setattr(checkpointing, setting, before)
    loss.backward()
    return not any(row.name.startswith(":BlockInput") for row in gact.report().rows)


def test_inputs_that_deepspeed_stores_in_its_own_way_are_left_to_it(ranks):
    # of the three settings this one has no effect without the others, so that the model still runs
    assert ranks(partitioned_by_deepspeed, "CONTIGUOUS_CHECKPOINTING") == [True, True]


IMPORTS = """
import sys, gact_dist
before = "deepspeed" in sys.modules
lazily = gact_dist.deepspeed.initialize
import gact_dist.deepspeed
from gact_dist.deepspeed import initialize
print(before, initialize is lazily is gact_dist.deepspeed.initialize)
"""


@pytest.mark.parametrize("first", ["", "import gact_dist.deepspeed\n", "from gact_dist.deepspeed import initialize\n"])
def test_the_module_can_be_imported_in_each_of_the_usual_ways(first):
    script = first + (IMPORTS if not first else "import gact_dist\nprint(gact_dist.deepspeed.initialize.__module__)")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ("gact_dist.deepspeed" if first else "False True")


def adaptation_steps(micro_batches: int) -> list[int]:
    engine = start(ds_config(1, SMALL, micro_batches))
    adapted = []
    for number in range(5 * micro_batches):
        before = engine.gact.adaptation
        run(engine, number, number + 1)
        if engine.gact.adaptation is not before:
            adapted.append(number)
    end(engine)
    return adapted


def test_the_interval_counts_optimizer_steps(ranks):
    """Adapted before the second forward, and from then on every two optimizer steps of three micro-batches."""
    assert ranks(adaptation_steps, 3)[0] == [1, 7, 13]


def saved_and_resumed(folder: str, stage: int) -> tuple:
    config = ds_config(stage, SMALL)
    straight = start(config)
    run(straight, 0, 3)
    straight.save_checkpoint(folder, client_state={"mine": 5})
    random_state = torch.get_rng_state()
    wanted, plan = run(straight, 3, 6)[0], straight.gact.plan
    end(straight)
    resumed = start(config)
    _, client_state = resumed.load_checkpoint(folder)
    torch.set_rng_state(random_state)
    got = run(resumed, 3, 6)[0]
    result = wanted, got, plan == resumed.gact.plan, client_state["mine"], "gact_dist" in client_state
    end(resumed)
    return result


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_checkpoint_on_disk_resumes_bitwise(ranks, tmp_path, stage):
    for wanted, got, same_plan, mine, ours_is_left in ranks(saved_and_resumed, str(tmp_path), stage):
        assert got == wanted
        assert same_plan
        assert (mine, ours_is_left) == (5, False)


def saved_plan(folder: str, stage: int) -> dict:
    engine = start(ds_config(stage, SMALL))
    run(engine, 0, 3)
    engine.save_checkpoint(folder)
    plan = engine.gact.plan
    end(engine)
    return plan


def loaded_plan(folder: str, stage: int) -> dict:
    engine = start(ds_config(stage, SMALL))
    engine.load_checkpoint(folder, load_module_only=True, load_optimizer_states=False)
    plan = engine.gact.plan
    losses, _ = run(engine, 3, 5)
    end(engine)
    return plan | {"finite": all(loss == loss for loss in losses)}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_plan_travels_to_another_world_size(ranks, tmp_path, stage):
    plan = ranks(saved_plan, str(tmp_path), stage, world_size=2)[0]
    assert ranks(loaded_plan, str(tmp_path), stage, world_size=1)[0] == plan | {"finite": True}


def ready_config(path: str) -> tuple[float, bool, str]:
    settings = json.loads(Path(path).read_text())
    settings["gact"] |= {"min_numel": 16, "calibration_samples": 4}
    engine = start(settings)
    run(engine, 0, 3)
    found = engine.gact.report().ratio, bool(engine.gact.plan), str(next(engine.module.parameters()).dtype)
    end(engine)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ready_configs_run(ranks, stage):
    for ratio, adapted, dtype in ranks(ready_config, str(ROOT / "configs" / "deepspeed" / f"zero{stage}.json")):
        assert ratio > 3
        assert adapted
        assert dtype == "torch.bfloat16"


class Unequal(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary]; samples differ thirtyfold in size."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 64)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 37))
        self.register_buffer("size", torch.logspace(-1, 0.5, SAMPLES)[:, None, None])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens) * self.size)


def without_dropout(dropout: float) -> nn.Module:
    """TinyGPT whose gradient can be computed again."""
    return TinyGPT()


def reduced_moments(engine: Any, steps: int) -> tuple[float, float]:
    """(squared error of the gradients that the optimizer gets, their squares), summed over the steps under a plan."""
    from deepspeed.utils import safe_get_full_grad

    reference, noise, square = TinyGPT(), 0.0, 0.0
    for number in range(steps):
        inputs, targets = batch_of(number, dist.get_rank())
        reference.load_state_dict(engine.module.state_dict())
        exact = flat_gradient(reference, loss_of(reference(inputs), targets))
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        engine.backward(loss_of(engine(inputs), targets))
        if engine.gact.plan:
            reduced = torch.cat([safe_get_full_grad(parameter).flatten() for parameter in engine.module.parameters()])
            noise += float((reduced - exact).square().sum())
            square += float(exact.square().sum())
        engine.step()
    return noise, square


@dataclass(frozen=True)
class Chosen:
    """What a job of four steps under ZeRO-2 comes to with a block, on this rank."""

    plan: dict[str, Any]
    history: list[dict[str, Any]]
    report: gact_dist.MemoryReport
    moments: tuple[float, float] | None


def chosen(block: dict[str, Any], model: Callable[..., nn.Module] = TinyGPT) -> Chosen:
    engine = start(ds_config(2, SMALL | block), model)
    gact, moments = engine.gact, None
    if model is without_dropout:
        moments = reduced_moments(engine, 4)
    else:
        run(engine, 0, 4)
    gact.detach()
    end(engine)
    return Chosen(gact.plan, gact.history, gact.report(), moments)


def chosen_by_each() -> dict[str, Chosen]:
    acgc = chosen({"policy": "acgc", "error": ERROR}, without_dropout)
    return {
        "acgc": acgc,
        "actnn": chosen({"policy": "actnn", "bits": 2, "calibration_samples": SAMPLES}, Unequal),
        # of tensors that are all stored: perturbation does not see what one does by way of others
        **{estimator: chosen({"estimator": estimator, "derive": False}) for estimator in ESTIMATORS},
        "retained_bytes": chosen({"retained_bytes": acgc.report.exact_bytes // 9}),  # between 3 and 4 bits
    }


def test_a_block_chooses_the_policy_the_estimator_and_the_budget(ranks):
    first, second = ranks(chosen_by_each)
    for name, job in first.items():
        assert len(job.history) == 2
        assert (job.plan, job.history) == (second[name].plan, second[name].history)
    # acgc: what the job itself is told, and what its optimizer got
    error, (noise, square) = first["acgc"].report.gradient_error, first["acgc"].moments
    assert error.measured <= error.tolerated == ERROR
    assert 0 < noise <= ERROR * square
    assert first["acgc"].history[-1]["average_bits"] < 4
    # actnn: shares of the samples have bits of their own, two on average
    rows = [row for row in first["actnn"].report.rows if row.name in first["actnn"].plan]
    assert any(isinstance(bits, tuple) for bits in first["actnn"].plan.values())
    # and a bit more for each element that is made again
    derived = sum(math.prod(row.shape) for row in first["actnn"].report.rows if row.codec == "derived")
    stored = sum(math.prod(row.shape) for row in rows)
    assert sum(math.prod(row.shape) * row.bits for row in rows) <= 2 * stored + derived
    # Both estimators at the same weights. Four directions leave 0.05 to 0.1 on a tensor, two differences of roundings
    # with some tens of effective dimensions 0.15: three standard deviations are a factor of 1.67.
    known, perturbed = ({n: t["sensitivity"] for n, t in first[e].history[0]["tensors"].items()} for e in ESTIMATORS)
    ratios = [perturbed[name] / known[name] for name in known]
    assert 0.6 < min(ratios) < max(ratios) < 1.67
    assert median(ratios) == pytest.approx(1.0, rel=0.1)
    assert perturbed != known
    for found in (first, second):
        # the step between widths of the smallest tensors is far below a tenth of all bytes
        assert 0.9 * found["acgc"].report.exact_bytes // 9 <= found["retained_bytes"].report.retained_bytes
        assert found["retained_bytes"].report.retained_bytes <= found["acgc"].report.exact_bytes // 9


def refused(changes: dict[str, Any], model: Callable[..., nn.Module] = TinyGPT) -> str:
    try:
        start(ds_config(1, {}) | changes, model)
    except (ValueError, TypeError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gact": {"levl": "L2"}}, "did you mean 'level'"),
        ({"gact": {"offload": {"enable": True}}}, "did you mean 'enabled'"),
        ({"gact": {"offload": {"prefetch": "2"}}}, "offload.prefetch is '2' (str)"),
        ({"gact": {"level": "L3"}}, "no CUDA device"),
        ({"gact": {"enabled": "yes"}}, "expected true or false"),
        ({"gact": {"bits": "4"}}, "bits is '4' (str)"),
        ({"gact": "L2"}, "expected a block of keys and values"),
        ({"gact": {"level": "L5"}}, "expected one of L0"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            '"activation_checkpointing.partition_activations"',
        ),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, '"activation_checkpointing.cpu_checkpointing"'),
        (
            {"activation_checkpointing": {"contiguous_memory_optimization": True}},
            '"activation_checkpointing.contiguous_memory_optimization"',
        ),
        ({"compile": {"deepcompile": True}}, '"compile.deepcompile"'),
    ],
)
def test_a_block_that_cannot_be_used_is_named_before_deepspeed_starts(ranks, changes, text):
    assert text in ranks(partial(refused, changes), world_size=1)[0]


def pipeline_module(dropout: float) -> nn.Module:
    import deepspeed

    deepspeed.init_distributed("gloo")
    return deepspeed.pipe.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())


def test_a_pipeline_module_is_refused(ranks):
    (text,) = ranks(refused, {}, pipeline_module, world_size=1)
    assert "the model is a PipelineModule" in text
    assert "torch.distributed.pipelining" in text


def test_a_block_that_is_off_leaves_the_engine_alone(ranks):
    assert ranks(is_untouched, {"enabled": False, "level": "L2"}, world_size=1) == [True]


def is_untouched(block: dict[str, Any]) -> bool:
    engine = start(ds_config(1, block))
    untouched = not hasattr(engine, "gact") and "save_checkpoint" not in vars(engine)
    end(engine)
    return untouched
