"""The table of modes: every way of sharding, checkpointing, computing and executing, and how a job runs in each.

    python tests/support/modes.py --write docs/modes.md     run every cell on real ranks and write the table

A cell is a job: a small GPT, three optimizer steps, the wrappers of its row. test_modes.py runs the cells that every
run of the tests has time for, and with --all the others; so does this file, as a script.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from exact_codecs import store_exactly
from ranks import close_pools, count_collectives, run_ranks
from small_models import Block, TinyGPT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gact_dist
from gact_dist import Config, MemoryReport

# 320 tokens: no activation has the shape of a parameter
VOCABULARY, SAMPLES, LENGTH, STEPS = 37, 8, 40, 3
CHECKPOINTS = ("none", "non-reentrant", "reentrant", "selective")
PRECISIONS = ("fp32", "bf16")
EXECUTIONS = ("eager", "compile", "inlined")
# Beyond what a sum of many independent roundings varies by: at 4 bits the gradient answers to rounding not quite
# linearly (a quarter, measured), and the prediction comes from 4 of 8 samples of another batch.
VARIANCE_RATIO = (0.6, 1.6)
# So high that the gradient outweighs the weight it is subtracted from: some rows keep weights in bfloat16 only.
LAST_RATE = 1024.0
# attention outputs; not those of mm, which DeepSpeed's ZeRO-3 linear changes in place after they were cached
SAVED_BY_POLICY = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.addmm.default]


@dataclass(frozen=True)
class Cell:
    """One job of the table."""

    row: str
    checkpoint: str
    precision: str
    execution: str

    def __str__(self) -> str:
        return f"{self.row}-{self.checkpoint}-{self.precision}-{self.execution}"


class ModeGPT(TinyGPT):
    """TinyGPT whose blocks run under the cell's checkpoint; `entry` and `exit`: what of it a pipeline stage holds."""

    def __init__(self, cell: Cell, stage: int | None = None) -> None:
        super().__init__(VOCABULARY, dropout=0.1)
        self.checkpoint = cell.checkpoint
        self.entry, self.exit = stage in (None, 0), stage in (None, 1)
        if stage is not None:
            self.blocks = nn.ModuleList([self.blocks[stage]])
        if not self.entry:
            self.embedding = None
        if not self.exit:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.entry else x
        for block in self.blocks:
            x = self._run(block, x)
        return self.head(self.norm(x)) if self.exit else x

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpoint == "none":
            return block(x)
        if self.checkpoint == "selective":
            contexts = partial(create_selective_checkpoint_contexts, SAVED_BY_POLICY)
            return checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(block, x, use_reentrant=self.checkpoint == "reentrant")


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """[samples, length] tokens and targets of one rank's step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return cross_entropy(logits.float().flatten(0, -2), targets.flatten())


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh of each kind for all cells of a process: every new one would bring process groups with threads."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Job:
    """A job in progress on this rank; a row overrides what its wrappers do differently."""

    world_size = 2
    data_parallel = 2
    """ranks over which gradients are averaged"""
    copies = 1
    """ranks that hold the same part of a weight"""
    tensor_parallel = 1
    """ranks that split some weights, and hold the others each"""
    microbatches = 1
    process_group: Any = None
    peers: tuple[tuple[int, ...], ...] = ()
    """ranks whose weights must stay the same, bit for bit, under real rounding as well"""

    @staticmethod
    def is_replicated(name: str) -> bool:
        """Whether peers hold the same part of this weight."""
        return True

    def __init__(self, cell: Cell, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.cell = cell
        self.model = self.wrap(self.compiled(self.build()))
        self.optimizer = optimizer(self.model.parameters())

    def build(self) -> nn.Module:
        return ModeGPT(self.cell)

    def compiled(self, model: nn.Module) -> nn.Module:
        if self.cell.execution != "eager":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def attach(self, config: Config) -> gact_dist.Controller:
        gact = gact_dist.attach(self.model, config=config, process_group=self.process_group)
        gact.follow()
        return gact

    def precision(self) -> Any:
        """Around forward; wrappers that have a policy of their own need nothing here."""
        bf16 = self.cell.precision == "bf16"
        return torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext()

    def forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self.precision():
            loss = loss_of(self.model(inputs), targets)
        self.backward(loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def data_rank(self) -> int:
        return dist.get_rank()

    def weights(self) -> dict[str, Tensor]:
        """This rank's part of every parameter, as the optimizer keeps it."""
        return {name: local_part(parameter) for name, parameter in self.model.named_parameters()}

    def close(self) -> None:
        """Undo what building it did to the process."""


def local_part(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


class DDP(Job):
    copies = 2
    peers = ((0, 1),)

    def wrap(self, model):
        return nn.parallel.DistributedDataParallel(model)


class FSDP1(Job):
    strategy = "FULL_SHARD"
    original_parameters = False

    def mesh(self):
        return None

    def wrap(self, model):
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        bf16 = self.cell.precision == "bf16"
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            sharding_strategy=ShardingStrategy[self.strategy],
            use_orig_params=self.original_parameters,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_mesh=self.mesh(),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if bf16 else None,
        )

    def precision(self):
        return nullcontext()


class FSDP1Original(FSDP1):
    original_parameters = True


class FSDP1GradOp(FSDP1):
    strategy = "SHARD_GRAD_OP"


class FSDP1NoShard(FSDP1):
    strategy = "NO_SHARD"
    original_parameters = True
    copies = 2
    peers = ((0, 1),)


class FSDP1Hybrid(FSDP1):
    strategy = "HYBRID_SHARD"
    world_size = data_parallel = 4
    copies = 2
    peers = ((0, 2), (1, 3))

    def mesh(self):
        return mesh_of((2, 2), ("replicate", "shard"))


class FSDP1HybridGradOp(FSDP1Hybrid):
    strategy = "_HYBRID_SHARD_ZERO2"


class FSDP2(Job):
    reshard: bool | None = None
    offload = False

    def mesh(self):
        return mesh_of((2,), ("dp",))

    def wrap(self, model):
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        bf16 = self.cell.precision == "bf16"
        options: dict[str, Any] = {"mesh": self.mesh(), "reshard_after_forward": self.reshard}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def precision(self):
        return nullcontext()


class FSDP2Kept(FSDP2):
    reshard = False


class FSDP2Resharded(FSDP2):
    reshard = True


class FSDP2Offload(FSDP2):
    offload = True


class HSDP(FSDP2):
    world_size = data_parallel = 4
    copies = 2
    peers = ((0, 2), (1, 3))

    def mesh(self):
        return mesh_of((2, 2), ("replicate", "shard"))


class TensorParallel(Job):
    """The layers of each block's MLP are split over the ranks, which all see the same samples."""

    data_parallel = 1
    tensor_parallel = 2
    peers = ((0, 1),)

    @staticmethod
    def is_replicated(name):
        return ".up." not in name and ".down.weight" not in name

    def wrap(self, model):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = mesh_of((1, 2), ("dp", "tp"))
        self.process_group = mesh["dp"]
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def data_rank(self):
        return 0


class FSDP2TensorParallel(FSDP2):
    world_size, data_parallel, tensor_parallel = 4, 2, 2
    peers = ((0, 1), (2, 3))
    is_replicated = staticmethod(TensorParallel.is_replicated)

    def wrap(self, model):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        self.both = mesh_of((2, 2), ("dp", "tp"))
        self.process_group = self.both["dp"]
        for block in model.blocks:
            parallelize_module(block, self.both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return super().wrap(model)

    def mesh(self):
        return self.both["dp"]

    def data_rank(self):
        return self.both["dp"].get_local_rank()


class Pipeline(Job):
    """Two stages, one on each rank, and a 1F1B schedule: up to two microbatches are in flight."""

    data_parallel = 1
    microbatches = 4

    def build(self):
        return ModeGPT(self.cell, stage=dist.get_rank())

    def wrap(self, model):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.process_group = mesh_of((1, 2), ("dp", "pp"))["dp"]
        stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, self.microbatches, loss_fn=loss_of)
        return model

    def forward_backward(self, inputs, targets):
        losses: list[Tensor] = []
        with self.precision():
            if dist.get_rank() == 0:
                self.schedule.step(inputs.contiguous())  # torch 2.11 refuses strides of a larger tensor
            else:
                self.schedule.step(target=targets, losses=losses)
        return torch.stack(losses).mean() if losses else torch.zeros(())

    def data_rank(self):
        return 0


class Zero(Job):
    stage = 0
    options: ClassVar[dict[str, Any]] = {}
    peers = ((0, 1),)

    def wrap(self, model):
        os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"] = "cpu", str(dist.get_rank())
        import deepspeed

        self.functions = torch.nn.functional.linear
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0} | self.options,
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if self.cell.precision == "bf16":
            settings["bf16"] = {"enabled": True}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.make_optimizer(model), config=settings)
        return self.engine

    def __init__(self, cell, optimizer):
        self.make_optimizer = lambda model: optimizer(model.parameters())
        super().__init__(cell, lambda _: None)

    def precision(self):
        return nullcontext()

    def backward(self, loss):
        self.engine.backward(loss)

    def update(self):
        self.engine.step()

    def set_learning_rate(self, rate):
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate

    def weights(self):
        from deepspeed.utils import safe_get_full_fp32_param

        whole = {name: safe_get_full_fp32_param(p) for name, p in self.engine.module.named_parameters()}
        if any(value is None for value in whole.values()):  # stage 0 in fp32 has no optimizer of DeepSpeed's own
            whole = dict(self.engine.module.named_parameters())
        return {name: local_part(value) / dist.get_world_size() ** 0.5 for name, value in whole.items()}

    def close(self):
        self.engine.destroy()
        torch.nn.functional.linear = self.functions


class Zero1(Zero):
    stage = 1


class Zero2(Zero):
    stage = 2


class Zero2Offload(Zero):
    stage = 2
    options: ClassVar[dict[str, Any]] = {"offload_optimizer": {"device": "cpu"}}


class Zero3(Zero):
    stage = 3


ROWS: dict[str, type[Job]] = {
    "DDP": DDP,
    "FSDP1": FSDP1,
    "FSDP1 use_orig_params": FSDP1Original,
    "FSDP1 SHARD_GRAD_OP": FSDP1GradOp,
    "FSDP1 NO_SHARD": FSDP1NoShard,
    "FSDP1 HYBRID_SHARD": FSDP1Hybrid,
    "FSDP1 HYBRID_SHARD_ZERO2": FSDP1HybridGradOp,
    "FSDP2": FSDP2,
    "FSDP2 kept unsharded": FSDP2Kept,
    "FSDP2 resharded": FSDP2Resharded,
    "FSDP2 CPU offload": FSDP2Offload,
    "HSDP": HSDP,
    "ZeRO-0": Zero,
    "ZeRO-1": Zero1,
    "ZeRO-2": Zero2,
    "ZeRO-2 optimizer offload": Zero2Offload,
    "ZeRO-3": Zero3,
    "TP": TensorParallel,
    "FSDP2 + TP": FSDP2TensorParallel,
    "PP": Pipeline,
}

CELLS = [Cell(*c) for c in ((r, c, p, e) for r in ROWS for c in CHECKPOINTS for p in PRECISIONS for e in EXECUTIONS)]


# -- running a cell ---------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """All that a job could have changed on this rank."""

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    collectives: list[int] = field(default_factory=list)
    random_state: Tensor = field(default_factory=lambda: torch.empty(0))
    adapted: list[bool] = field(default_factory=list)
    ratio: float = 1.0
    predicted_variance: float = 0.0
    compressed_parameters: list[str] = field(default_factory=list)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain descent at rate 0, until train() sets LAST_RATE for the last step: weights then move by one gradient."""
    return torch.optim.SGD(parameters, lr=0.0)


def train(
    cell: Cell, config: Config | None, *, exactly: bool = False, optimizer: Any = adamw, steps: int = STEPS
) -> Trace:
    """Run the job of a cell on this rank; exactly: whatever the plan says, tensors are kept as they are."""
    job, trace, gact = ROWS[cell.row](cell, optimizer), Trace(), None
    try:
        if config is not None:
            gact = job.attach(config)
            if exactly:
                store_exactly(gact)
        torch.manual_seed(7 + job.data_rank())  # dropout differs between ranks, as it does in real jobs
        for step in range(steps):
            before = gact.adaptation if gact else None
            if optimizer is sgd and step == steps - 1:
                job.set_learning_rate(LAST_RATE)
            with count_collectives() as count:
                loss = job.forward_backward(*batch_of(step, job.data_rank()))
                job.update()
            trace.losses.append(loss.detach().clone())
            trace.collectives.append(count.total)
            trace.adapted.append(gact is not None and gact.adaptation is not before)
        trace.weights = job.weights()
        trace.random_state = torch.get_rng_state()
        if gact is not None:
            trace.ratio = compressed_ratio(gact.report())
            trace.compressed_parameters = compressed_parameters(gact.report(), job.model)
            trace.predicted_variance = gact.adaptation.predicted_variance if gact.adaptation else 0.0
            gact.detach()
    finally:
        job.close()
    return trace


def compressed_ratio(report: MemoryReport) -> float:
    """Exact to retained bytes of all but what a selective checkpoint keeps as it is."""
    exact = [row for row in report.rows if row.codec == "exact"]
    kept = sum(row.bytes for row in exact if any(str(operator) in row.name for operator in SAVED_BY_POLICY))
    return (report.exact_bytes - kept) / (report.retained_bytes - kept)


@cache
def shapes_of_parameters() -> frozenset[tuple[int, ...]]:
    with torch.device("meta"):
        return frozenset(tuple(parameter.shape) for parameter in TinyGPT(VOCABULARY).parameters())


def compressed_parameters(report: MemoryReport, model: nn.Module) -> list[str]:
    """Rows, but for those stored as they are, with a parameter's shape: the whole's or this rank's part's."""
    shapes = shapes_of_parameters() | {tuple(local_part(parameter).shape) for parameter in model.parameters()}
    transposed = {shape[::-1] for shape in shapes}
    return [row.name for row in report.rows if row.codec != "exact" and row.shape in shapes | transposed]


def differences(first: Trace, second: Trace) -> list[str]:
    """Where two traces are not bitwise equal."""
    found = [f"loss of step {i}" for i, (a, b) in enumerate(zip(first.losses, second.losses, strict=True)) if a != b]
    found += [name for name in first.weights if not torch.equal(first.weights[name], second.weights[name])]
    if not torch.equal(first.random_state, second.random_state):
        found.append("random number generator")
    return found


@dataclass
class Found:
    """What running a cell showed on one rank."""

    exact: list[str]
    adaptive: list[str]
    adapted: list[bool]
    collectives: tuple[list[int], list[int], list[int]]
    ratio: float
    compressed_parameters: list[str]
    """names of saved tensors with a parameter's shape that were compressed"""
    error_square: float
    """squared distance of the compressed job's first gradient from the exact one, this rank's part; of what all ranks
    of a tensor-parallel group hold, its share"""
    predicted: float
    """the same as the sensitivity predicts it for one rank's own gradient"""
    digests: dict[str, bytes]
    """of this rank's part of each weight, after a step with real rounding"""


ADAPTIVE = Config(bits=4, adapt_interval=2, watch_interval=0, calibration_samples=4, min_numel=16)


def run_cell(cell: Cell) -> Found:
    """Every check of a cell, on this rank."""
    torch._dynamo.reset()
    row = ROWS[cell.row]
    hooks = "inlined" if cell.execution == "inlined" else "eager"
    adapt = replace(ADAPTIVE, compile_hooks=hooks)
    exact = train(cell, Config.from_level("exact", compile_hooks=hooks))
    untouched = train(cell, None)
    adaptive = train(cell, adapt, exactly=True)
    plain, rounded = train(cell, None, optimizer=sgd), train(cell, adapt, optimizer=sgd)
    return Found(
        exact=differences(untouched, exact),
        adaptive=differences(untouched, adaptive),
        adapted=adaptive.adapted,
        collectives=(untouched.collectives, exact.collectives, adaptive.collectives),
        ratio=rounded.ratio,
        compressed_parameters=rounded.compressed_parameters,
        error_square=sum(
            _distance(rounded.weights[n], plain.weights[n]) / (row.tensor_parallel if row.is_replicated(n) else 1)
            for n in plain.weights
        )
        / LAST_RATE**2,
        predicted=rounded.predicted_variance,
        digests={
            name: hashlib.sha256(value.float().numpy().tobytes()).digest() for name, value in rounded.weights.items()
        },
    )


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).square().sum())


def variance_ratio(cell: Cell, found: list[Found]) -> float:
    """Measured over predicted variance of the whole job's gradient, from what all ranks found.

    Ranks (and microbatches) round independently, and the job averages their gradients.
    """
    row = ROWS[cell.row]
    predicted = sum(f.predicted for f in found) / row.data_parallel / row.microbatches / row.tensor_parallel
    return sum(f.error_square for f in found) / (predicted * row.copies / row.data_parallel)


def disagreements(cell: Cell, found: list[Found]) -> list[str]:
    """Replicated weights that differ between ranks after a step with real rounding."""
    row = ROWS[cell.row]
    return [
        f"{name} on ranks {group}"
        for group in row.peers
        for name in found[group[0]].digests
        if row.is_replicated(name) and len({found[rank].digests[name] for rank in group}) > 1
    ]


# -- what cannot be ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why a cell cannot be: the error that says so, and a pattern of its text."""

    error: type[Exception]
    text: str
    by: str
    """who refuses: torch, or gact_dist when it is attached"""

    @property
    def job(self) -> Callable[[Cell], Any]:
        """What raises the error. What torch refuses must fail without gact_dist."""
        return run_cell if self.by.startswith("gact_dist") else run_untouched


def run_untouched(cell: Cell) -> None:
    """The job of a cell without gact_dist, on this rank."""
    torch._dynamo.reset()
    train(cell, None)


REFUSALS: dict[Cell, Refusal] = (
    {
        cell: Refusal(RuntimeError, r"use_reentrant=True.*incompatible", "torch: stages run autograd.grad")
        for cell in CELLS
        if cell.row == "PP" and cell.checkpoint == "reentrant"
    }
    | {
        cell: Refusal(
            ValueError, "compile_hooks is 'inlined' and .* splits", "gact_dist: parameters do not stay in place"
        )
        for cell in CELLS
        if cell.execution == "inlined" and cell.row.startswith(("FSDP", "HSDP", "TP", "ZeRO-3"))
    }
    | {
        cell: Refusal(Exception, "not supported between instances of 'NoneType'", "torch 2.13: its partitioner fails")
        for cell in CELLS
        if cell.row == "DDP" and cell.checkpoint == "selective" and cell.execution != "eager"
    }
)


REFUSED, FAILS = "refused", "FAILS:"

# -- the table --------------------------------------------------------------------------------------------------

HEADER = """# Modes

Every way of sharding, checkpointing and computing that is supported, each run on real ranks (gloo, CPU): a small GPT,
three AdamW steps. Made by `python tests/support/modes.py --write docs/modes.md`, which fails if a cell does not
hold; every run of the tests takes a slice of it, `bash launch/test.sh --all` the whole. What a cell asserts:

- with exact codecs, and with adaptation on but every tensor kept as it is: losses, weights, random numbers and the
  collectives of every step are bitwise those of the untouched job (excepted are those of adaptations and, before the
  first step, of the comparison with the exact gradient);
- with real bits (4 on average): ranks that hold the same weight still agree in every bit, and the measured variance of
  the whole job's gradient is between 0.6 and 1.6 of what the sensitivities predict;
- nothing with the shape of a parameter, or of a rank's part of one, is compressed.

What torch refuses is shown to fail without gact_dist too; what gact_dist refuses, it refuses when it is attached.

A cell shows the ratio of exact to retained activation bytes (of all but what a selective checkpoint keeps as it is, in
what is compiled), then measured over predicted variance. This model is tiny: tensors of 16 and more elements are
compressed, and its statistics weigh more than they would in a real one.
"""


def row_of_table(name: str, execution: str, results: dict[Cell, str]) -> str:
    """One Markdown line."""
    cells = [results[Cell(name, c, p, execution)] for c in CHECKPOINTS for p in PRECISIONS]
    return f"| {name} | " + " | ".join(cells) + " |"


def table(execution: str, results: dict[Cell, str]) -> str:
    """All rows of one way to execute."""
    columns = [f"{checkpoint}, {precision}" for checkpoint in CHECKPOINTS for precision in PRECISIONS]
    lines = [f"| {execution} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    return "\n".join(lines + [row_of_table(name, execution, results) for name in ROWS])


def refused_rows() -> set[str]:
    """What is refused, and by whom: a line for a row whose checkpoints all are, else one for each checkpoint."""
    whole = {(row, execution) for row in ROWS for execution in EXECUTIONS} - {
        (cell.row, cell.execution) for cell in CELLS if cell not in REFUSALS
    }
    return {
        f"{c.row}, {'' if (c.row, c.execution) in whole else f'{c.checkpoint}, '}{c.execution}: {refusal.by}"
        for c, refusal in REFUSALS.items()
    }


def page(results: dict[Cell, str]) -> str:
    """The whole page."""
    tables = [part for execution in EXECUTIONS for part in (table(execution, results), "")]
    notes = [coverage(results), "", "Refused:", "", *(f"- {text}" for text in sorted(refused_rows()))]
    where = (
        f"torch {torch.__version__}, {datetime.date.today()}; compile: each block, backend aot_eager; inlined: that "
        'with compile_hooks="inlined".'
    )
    return "\n".join([HEADER, *tables, *notes, "", where]) + "\n"


def is_refused(cell: Cell) -> bool:
    """Whether a cell that cannot be raises the error that says so."""
    try:
        run_ranks(REFUSALS[cell].job, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
    except REFUSALS[cell].error as error:
        return re.search(REFUSALS[cell].text, str(error)) is not None
    return False


def problems(cell: Cell, found: list[Found]) -> list[str]:
    """What does not hold in a cell."""
    wrong = [
        problem
        for on_rank in found
        for problem in (*on_rank.exact, *on_rank.adaptive, *(f"compressed {n}" for n in on_rank.compressed_parameters))
    ]
    wrong += disagreements(cell, found)
    # bf16 at 4 bits, with statistics and small tensors kept exactly; a compiled region under autocast also keeps the
    # bf16 copies of its weights, which weigh more than two samples of a microbatch
    least_ratio = 2 if cell.precision == "bf16" and cell.execution != "eager" else 3
    for rank, on_rank in enumerate(found):
        untouched, exact, adaptive = on_rank.collectives
        steps = [step for step, adapted in enumerate(on_rank.adapted) if not adapted]
        alike = [step for step in steps if step > 0]  # rounding is compared with the exact gradient before the first
        if exact != untouched or any(adaptive[step] != untouched[step] for step in alike):
            wrong.append(f"rank {rank} has collectives {exact} and, adaptive, {adaptive}; untouched {untouched}")
        if len(steps) == len(on_rank.adapted):
            wrong.append(f"rank {rank} never adapted")
        if not on_rank.ratio > least_ratio:
            wrong.append(f"rank {rank} has ratio {on_rank.ratio:.2f}, expected more than {least_ratio}")
    if not VARIANCE_RATIO[0] < variance_ratio(cell, found) < VARIANCE_RATIO[1]:
        wrong.append(f"variance ratio {variance_ratio(cell, found):.2f}")
    return wrong


def main() -> int:
    """Run every cell; 1 if one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="file for the table")
    options = parser.parse_args()
    results: dict[Cell, str] = {}
    for cell in CELLS:
        results[cell] = result_of(cell)
        print(cell, results[cell], flush=True)
    print(coverage(results))
    if options.write:
        options.write.write_text(page(results))
    return 1 if any(result.startswith(FAILS) for result in results.values()) else 0


def result_of(cell: Cell) -> str:
    """What the table says of a cell, after running it."""
    if cell in REFUSALS:
        return REFUSED if is_refused(cell) else f"{FAILS} is not refused"
    found = run_ranks(run_cell, cell, world_size=ROWS[cell.row].world_size, timeout_s=300)
    wrong = problems(cell, found)
    ratio = min(on_rank.ratio for on_rank in found)
    return f"{FAILS} {'; '.join(wrong)}" if wrong else f"{ratio:.1f}, {variance_ratio(cell, found):.2f}"


def coverage(results: Mapping[Cell, str]) -> str:
    """How many cells there are of each kind."""
    refused = sum(result == REFUSED for result in results.values())
    failed = sum(result.startswith(FAILS) for result in results.values())
    held = len(results) - refused - failed
    return f"{len(results)} of {len(CELLS)} cells: {held} hold, {refused} refused, {failed} fail."


if __name__ == "__main__":
    # the cells travel to the ranks by name, and must be this module's under the name that it has there
    import modes

    status = modes.main()
    close_pools()
    sys.exit(status)
