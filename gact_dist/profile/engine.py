"""A profile: the job runs a few steps under each level, and a tracker follows its storages.

[Note: what is run] The job takes steps under one level after the other, with the package's real hooks: what they keep,
what they decode and when that is freed is not modelled but done. With fake tensors operators only find shapes, those of
the codec among them, so that a payload has its size and no memory. Two decisions of the hooks depend on values, which
fake tensors do not have: the noise of a dropout counts as one bit, and integers keep their type, as on a GPU.

The first step differs: the optimizer makes its state, and the hooks hold some tensors until they have seen who reads
them. A later step is reported, when what is kept no longer changes. With values, bits are measured on the job's batch
after the first step, as in a run. Without, one forward is cut at the blocks, as a measurement or a comparison would cut
it, for what is stored because it lies in another block than what it could be made of; and tensors have the level's
average, and what those that are derived leave to them; a measurement would spread the same sum over them otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .._torch_internals import fake_tensors, is_fake
from ..config import LEVELS, Config
from ..controller import Controller, attach
from ..distributed import fake_ranks
from ..hooks import LOG_SOFTMAX, ReportRow
from ..policies import Plan, plan_of_equals, policy_of
from ..sensitivity import MeasurementError, note_blocks
from .analysis import Step
from .building import with_small_values
from .full_batches import full_batches
from .layouts import ProfileError, Settings, mesh_of, spread
from .result import KeptTensor, LevelProfile, Profile
from .tracker import Phase, Tracker

UNTOUCHED = "untouched"
_SETTINGS = ("derive", "recomputed")  # of Config, that a level's name may have behind a "+"
_EXACT = "exact"  # the codec of a row
DEFAULT_LEVELS = (UNTOUCHED, "L1", "L2", "L2.1", "L2.2")
_MOST_STEPS = 4  # in which the hooks learn
Build = Callable[[], tuple[nn.Module, Any, Callable[[Any], Tensor]]]


def profile(
    build: Build,
    levels: Sequence[str] = DEFAULT_LEVELS,
    settings: Settings | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Where the memory of a job's step goes, untouched and under levels of compression.

    build: returns (model, batch, loss_fn), loss_fn(batch) being the scalar loss; called within fake tensors where
    settings say so. levels: names in gact_dist.LEVELS, with "+derive" for Config.derive and "+recomputed" for
    Config.recomputed, and "untouched". tell: is told what is being done. Raises ProfileError, and what the job's own
    code raises.
    """
    settings = Settings() if settings is None else settings
    configs = {level: _config_of(level, settings) for level in levels}
    if not configs:
        raise ProfileError(f"no level was given, expected some of {UNTOUCHED}, {', '.join(LEVELS)}")
    found: list[LevelProfile] = []
    done: dict[tuple[Config | None, float | None], LevelProfile] = {}
    with _running(build, settings) as run:
        for level, wanted in configs.items():
            config = _without_measuring(wanted) if wanted is not None and not settings.measures else wanted
            bits = None if config is wanted or wanted is None else wanted.bits
            if (config, bits) not in done:
                tell(f"steps under {level}")
                done[config, bits] = run.profiled(level, config, bits)
            found.append(replace(done[config, bits], level=level))
    notes = _notes(settings, any(config is not None and _measures(config) for config in configs.values()))
    return Profile(settings.world_size, settings.layout, settings.is_fake, run.parameters, tuple(found), notes)


@contextmanager
def _running(build: Build, settings: Settings) -> Iterator[_Run]:
    """The job, with a tracker that follows its storages."""
    with ExitStack() as stack:
        if settings.layout is not None:
            stack.enter_context(fake_ranks(settings.world_size))
        mesh = mesh_of(settings)
        mode = stack.enter_context(fake_tensors()) if settings.is_fake else None
        tracker = Tracker()
        stack.enter_context(tracker.tracking())
        run = _Run(with_small_values(build), settings, tracker, mode, mesh)
        if mode is not None:
            stack.enter_context(full_batches())
        gc.collect()
        gc.freeze()  # nobody waits for the collector to look at all modules of Python before each step
        stack.callback(gc.unfreeze)
        yield run


def _config_of(level: str, settings: Settings) -> Config | None:
    """The settings of a level; None for the untouched job."""
    if level == UNTOUCHED:
        return None
    name, *behind = level.split("+")
    unknown = [setting for setting in behind if setting not in _SETTINGS]
    if unknown:
        raise ProfileError(f"level {level!r} ends in {unknown[0]!r}, expected one of {', '.join(_SETTINGS)} behind a +")
    if "recomputed" in behind and not settings.measures:
        raise ProfileError(
            f"level {level!r} compresses what a measurement has seen, and nothing is measured; expected a job on its "
            "own tensors: leave out --fake, --layout and --no-measure, and give a function in place of a config"
        )
    try:
        config = Config.from_level(name, **dict.fromkeys(behind, True))
    except ValueError as error:
        raise ProfileError(f"{error}; {UNTOUCHED!r} is the job without compression") from None
    if not policy_of(config).compresses:
        return None
    if config.offload.enabled:
        raise ProfileError(
            f"level {level!r} keeps payloads on the host, expected one without offload: their bytes are those of "
            "level L1 or L2, and the device holds some of them"
        )
    return config


def _measures(config: Config) -> bool:
    """Whether bits follow from a measurement."""
    return policy_of(config).adapts


def _without_measuring(config: Config) -> Config:
    """What stores the bytes of a config that measures, where there is nothing to measure."""
    if not (_measures(config) and config.bits):
        return config
    return replace(config, policy="uniform", bits=ceil(config.bits), derive=config.derive is not False)


def _notes(settings: Settings, measures: bool) -> tuple[str, ...]:
    notes = [
        "live storages of tensors are counted; what an operator allocates and frees within itself is not, nor what an "
        "allocator keeps"
    ]
    if measures and not settings.measures:
        notes.append(
            "nothing was measured, so L2 and other levels that adapt have their average bits for every tensor, with "
            "what those that are derived leave them; a measurement gives some more and others fewer, with the same sum"
        )
    if measures and settings.measures:
        notes.append(
            "bits of levels that adapt were measured on this batch: L2 spends as many as L1 where the gradient needs "
            "them, but for what it derives"
        )
    if measures:
        notes.append("an adaptation takes more memory while it measures, which is not counted")
    if settings.is_fake:
        notes.append("integers are counted in their own type; in steps on a CPU they take the smallest that holds them")
    if settings.layout in ("ddp", "zero1"):
        notes.append("DDP's buckets are counted as one more copy of the gradients (gradient_as_bucket_view=False)")
    if settings.layout in ("zero2", "zero3"):
        notes.append("ZeRO-2 and ZeRO-3 are those of FSDP2; DeepSpeed also keeps master weights")
    return tuple(notes)


class _Run:
    """One job, which takes steps under one level after the other."""

    def __init__(
        self, built: tuple[nn.Module, Any, Any], settings: Settings, tracker: Tracker, mode: Any, mesh: Any
    ) -> None:
        self._tracker, self._taken, self._measures = tracker, 0, settings.measures
        model, batch, loss_fn = built
        if mode is not None:
            batch = tree_map_only(Tensor, lambda tensor: tensor if is_fake(tensor) else mode.from_tensor(tensor), batch)
            _make_fake(model, mode)
        model.train()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        self._names = {module: name for name, module in model.named_modules()}
        self._job = spread(model, batch, loss_fn, settings, mesh)
        tracker.name_modules(self._names)
        self._owners: dict[int, str] = {}
        self._mark(batch)

    def _mark(self, batch: Any) -> None:
        """Say what the storages are that are there before the first step."""
        tracker = self._tracker
        for module, name in self._names.items():
            for tensor in module.parameters(recurse=False):
                self._owners[id(tensor)] = name
                tracker.mark(tensor, "parameters", name)
            for tensor in module.buffers(recurse=False):
                tracker.mark(tensor, "buffers", name)
        for tensor in _tensors(batch):
            tracker.mark(tensor, "batch")
        for tensor in self._job.buckets:
            tracker.mark(tensor, "sharding")

    def profiled(self, level: str, config: Config | None, bits: float | None = None) -> LevelProfile:
        """Take some steps under a level, and say what the last one held.

        bits: of a level that would measure, where nothing is measured: on average, before what is derived gives some.
        """
        first, report, tensors = self._taken + 1, None, tuple[KeptTensor, ...]()
        if config is None:
            for _ in range(2 if first == 1 else 1):
                self._step(None)
        else:
            controller = attach(self._job.model, config=config)
            try:
                self._steps_until_learnt(controller, bits)
                report, tensors = controller.report(), tuple(_kept(controller))
            finally:
                controller.detach()
        first_peak, last = self._analysed(first).peak_bytes, self._analysed(self._taken)
        kept_bytes = last.activation_bytes
        exact_bytes, retained_bytes = (
            (kept_bytes, kept_bytes) if report is None else (report.exact_bytes, report.retained_bytes)
        )
        return LevelProfile(
            level, last.peak_bytes, last.peak_phase.value, last.peak_site, first_peak,
            {phase.value: size for phase, size in last.phase_peaks.items()}, last.peak(), last.without_optimizer_bytes,
            exact_bytes, retained_bytes, last.by_module(), last.by_operator(), last.by_line(), last.timeline, tensors,
        )  # fmt: skip

    def _analysed(self, step: int) -> Step:
        return Step(self._tracker.storages, self._tracker.events, self._tracker.marks, step, self._device)

    def _steps_until_learnt(self, controller: Controller, bits: float | None) -> None:
        """Take steps until what they keep no longer changes. bits: as for profiled()."""
        self._step(controller, trains=False)
        self._taken += 1  # what follows is no step of the job's, and looked at as none
        self._tracker.begin(Phase.FORWARD, self._taken)
        job, hooks = self._job, controller._schedule.hooks
        if self._measures and _measures(controller.config):
            controller.calibrate(job.loss_fn, job.batch, controller.config.calibration_samples)
        elif hooks is not None and hooks.encoder.may_derive:
            with suppress(MeasurementError):  # a block that cannot run alone
                note_blocks(hooks, job.model, partial(job.loss_fn, job.batch))
        for _ in range(_MOST_STEPS):
            before = controller.report().rows
            if bits is not None and hooks is not None:
                hooks.plan = _equal_plan(before, bits)
            self._step(controller)
            if _as_kept(controller.report().rows) == _as_kept(before):
                break

    def _step(self, controller: Controller | None, trains: bool = True) -> None:
        """One step of the job. trains: whether the optimizer takes one too; in the first it always does."""
        gc.collect()  # what is garbage is not of this step
        self._taken += 1
        job, tracker, step = self._job, self._tracker, self._taken
        tracker.begin(Phase.FORWARD, step)
        with nullcontext() if controller is None else controller.step():
            loss = _checked(job.loss_fn(job.batch))
        tracker.begin(Phase.BACKWARD, step)
        loss.backward()
        del loss
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                tracker.mark(parameter.grad, "gradients", self._owners.get(id(parameter), ""))
        tracker.begin(Phase.OPTIMIZER, step)
        if job.optimizer is not None and (trains or step == 1):
            self._train(job.optimizer)
        job.model.zero_grad()

    def _train(self, optimizer: Any) -> None:
        optimizer.step()
        states = getattr(optimizer, "optim", optimizer).state  # of ZeroRedundancyOptimizer its own part
        for parameter, state in states.items():
            for tensor in _tensors(state):
                self._tracker.mark(tensor, "optimizer state", self._owners.get(id(parameter), ""))


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _make_fake(model: nn.Module, mode: Any) -> None:
    """Of a model that has real tensors, because it was built elsewhere or by values: these are not needed."""
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not is_fake(tensor):
                setattr(module, name, mode.from_tensor(tensor))


def _checked(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    got = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {tuple(loss.shape)} {'with' if loss.requires_grad else 'without'} a graph"
    raise ProfileError(f"the loss is {got}, expected a scalar with a graph")


def _as_kept(rows: Sequence[ReportRow]) -> list[Any]:
    """What the bytes of a step follow from, once the plan is known."""
    return [(row.name, row.shape, row.codec) for row in rows]


def _equal_plan(rows: Sequence[ReportRow], bits: float) -> Plan:
    """As many bits as a measurement would give to what a step stores. bits: of a level, on average."""
    stored = {row.name: prod(row.shape) for row in rows if row.codec == "quantised"}
    return plan_of_equals(bits, stored, sum(prod(row.shape) for row in rows if row.codec == "derived"))


def _kept(controller: Controller) -> Iterator[KeptTensor]:
    because = controller.exact_because
    for row in controller.report().rows:
        why = _why_exact(row, because, controller.config.min_numel)
        dtype = str(row.dtype).removeprefix("torch.")
        yield KeptTensor(row.name, row.shape, dtype, row.codec, row.bits, row.bytes, why)


def _why_exact(row: ReportRow, because: dict[str, str], min_numel: int) -> str:
    """Why a tensor is stored as it is; "" of one that is not."""
    if row.codec != _EXACT:
        return ""
    if row.name in because:
        return f"its backward {because[row.name]}"
    if prod(row.shape) < min_numel:
        return f"it has fewer than {min_numel} elements"
    if not (row.dtype.is_floating_point or row.dtype.is_complex):
        return "it holds integers"
    if row.shape[-1] == 1:
        return "it is a statistic: one value a row"
    if LOG_SOFTMAX in row.name:
        return "it is the log-softmax next to the loss"
    return "it is a statistic or a mask, or nothing was seen to read it"
