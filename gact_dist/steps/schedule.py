"""The steps of one attached model: what is open around a forward, when bits adapt, and what is known so far."""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import distributed
from .._torch_internals import VERSION, has_compiled_parts
from ..adaptation import (
    Adaptation,
    AdaptationInSteps,
    Adapter,
    Haste,
    LearntByAdapting,
    LearntByVerifying,
    Verifier,
)
from ..config import Config
from ..hooks import Clock, LearntNames, SavedTensorHooks, check_inlined
from ..offload import open_offload
from ..policies import Bits, Plan, policy_of
from ..run_log import RunLog
from ..sensitivity import ProbeBatch
from . import malloc
from .joined_steps import JoinedSteps
from .one_thread import OneThread
from .optimizer_steps import OptimizerSteps
from .plan_file import read_plan_file, warn_of_unknown, write_plan_file
from .progress import Progress
from .state import State, bounded

_log = logging.getLogger(__name__)
# What may differ between ranks without changing what they do together.
_OF_A_RANK = {"seed", "offload", "compile_hooks", "pack_stream", "plan_file", "run_dir"}
_LONGEST_INTERVAL = 8  # in adapt_intervals
_RETRIES = (1, 8, 64, 512)
"""optimizer steps from one attempt to measure something to the next, as long as nothing could be measured"""


class Schedule:
    """Counts steps, and adapts when that is due. Every rank of the groups must call the same methods together."""

    def __init__(self, model: nn.Module, config: Config, process_group: Any) -> None:
        """See attach()."""
        check_inlined(config, model)
        self.model, self.config = model, config
        tensor_parallel = distributed.tensor_parallel_groups(model)
        data_parallel = distributed.data_parallel_groups(process_group, tensor_parallel)
        self.groups = [*data_parallel, *tensor_parallel]
        """over which ranks share one plan, one after the other"""
        self.policy = policy_of(config)
        self.hooks: SavedTensorHooks | None = None
        """None with policy off"""
        self.adapter: Adapter | None = None
        """None with a policy that does not adapt"""
        self.verifier: Verifier | None = None
        """None where nothing is rounded, or nobody is to look"""
        if self.policy.compresses:
            rank = distributed.rank(*data_parallel) if data_parallel else 0
            offload = open_offload(model, config.offload, distributed.world_size()) if config.offload.enabled else None
            self.hooks = SavedTensorHooks(model, config, rank, offload, self.policy)
        if self.hooks is not None and self.policy.rounds and config.noise_limit > 0.0:
            self.verifier = Verifier(model, self.hooks, self.groups)
        if self.hooks is not None and self.policy.adapts:
            self.adapter = Adapter(model, self.hooks, data_parallel, self.groups, self.verifier)
        self._lazy = True
        self._joined = JoinedSteps(self)
        self._facts = _facts_of(config)
        self.enabled = self.hooks is not None
        """whether forwards are compressed; see disable()"""
        self.threads = OneThread()
        self._in_forward = 0
        self._after_forward: Callable[[], None] | None = None
        self.step = 0
        self.measuring = False
        """whether a forward that runs now is ours, not the job's"""
        self._adapting: AdaptationInSteps | None = None  # one that goes on in the next step
        self.adaptation: Adaptation | None = None
        self.sensitivity: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        self._plan_while_off = Plan()
        self._adapted_at: int | None = None
        # an interval is counted in optimizer steps where they are seen, see [Note: optimizer steps]
        self.optimizer_steps = None if self.adapter is None else OptimizerSteps(model)
        self._interval = config.adapt_interval
        self._failed = 0
        """adaptations in a row in which nothing could be measured"""
        self._progress = Progress(model, config, self.groups, self.enabled)
        _attached.add(self)
        self.run_log = None if config.run_dir is None else RunLog(config.run_dir, *_about(model, config))
        self._clock = Clock()
        if self.hooks is not None and self.run_log is not None:
            self.hooks.clock = self._clock
        if self.hooks is not None and config.plan_file is not None:
            default = self.policy.first_plan.default
            self.load(read_plan_file(config.plan_file, model, config, default, self.shared_by_all))

    @property
    def plan(self) -> Plan:
        """What tensors are stored at."""
        return self._plan_while_off if self.hooks is None else self.hooks.plan

    @property
    def shared_by_all(self) -> bool:
        """Whether every rank of the job shares the plan."""
        return math.prod(distributed.world_size(group) for group in self.groups) == distributed.world_size()

    # -- a forward ----------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compress what the current step's forward saves in the context."""
        if self.hooks is None or not self.enabled:
            yield
            return
        self.hooks.begin(self.step)
        if self.optimizer_steps is not None:
            self.optimizer_steps.begun(self.step)
        self._in_forward += 1
        try:
            with self.hooks.hooks():
                yield
        finally:
            self._in_forward -= 1
            if self._after_forward is not None and not self._in_forward:
                switch, self._after_forward = self._after_forward, None
                switch()

    def between_forwards(self, switch: Callable[[], None]) -> None:
        """Call a function now, or when the forward that is running is over."""
        if self._in_forward:
            self._after_forward = switch
        else:
            switch()

    def switch(self, on: bool, why: str) -> None:
        """Compress forwards from the next one on, or leave them as they are. The history notes it."""
        if self.hooks is not None and on != self.enabled:
            self.enabled, self._adapting = on, None
            self.history.append({"step": self.step, "event": "enabled" if on else "disabled", "why": why})

    def put_hooks(self) -> None:
        """Have the hooks that name what modules save while forwards are compressed, and none otherwise."""
        if self.hooks is None:
            return
        self.hooks.suspend()
        if self.enabled:
            self.hooks.resume()
        if self.optimizer_steps is not None:
            self.optimizer_steps.close()
            if self.enabled:
                self.optimizer_steps.watch()

    def next_step(self) -> None:
        """A step begins."""
        self.step += 1
        if self.run_log is not None:
            self.run_log.begin(self.step, self._clock.take())

    def log(self, values: Mapping[str, float | Tensor]) -> None:
        """Values of the current step for the run's log; with policy off of the next, as nothing else counts steps."""
        if self.run_log is None:
            return
        if self.hooks is None:
            self.next_step()
        self.run_log.add(values)

    def meet(self, doing: str) -> bool:
        """Wait for all ranks before collectives of ours; False if one has no batches left. See distributed.meet()."""
        if distributed.meet(self.groups, doing, self._facts):
            return True
        self._adapting = None
        self._joined.missed(doing)
        return False

    def watch(self) -> None:
        """After a step's forward."""
        if self.step == 1 and self.hooks is not None:
            saved = {row.name for row in self.hooks.account.rows}
            warn_of_unknown(self.config.plan_file, self.plan.bits, saved)
        if self.adapter is not None:
            self.adapter.watch()
        self._progress.after_forward(self.step, self.hooks)
        if self.hooks is not None and self.run_log is not None:
            self.run_log.stored(self.hooks.account.rows, self.hooks.account.exact_bytes)

    @contextmanager
    def measurement(self) -> Iterator[None]:
        """Forwards within the context are the package's own, not the job's."""
        self.measuring, began_s, compressing_s = True, perf_counter(), self._clock.seconds
        try:
            yield
        finally:
            self.measuring, self._clock.seconds = False, compressing_s
            if all(parameter.device.type == "cpu" for parameter in self.model.parameters()):
                malloc.trim()
            if self.run_log is not None:
                self.run_log.measured(perf_counter() - began_s, None if self.verifier is None else self.verifier.latest)

    # -- adapting -----------------------------------------------------------------------------------------------

    def due(self, in_steps: int = 0) -> bool:
        """Whether something should be measured this many steps from now; the same on all ranks."""
        return self._adaptation_due(in_steps) or self._verification_due(in_steps)

    def _adaptation_due(self, in_steps: int = 0) -> bool:
        if self.adapter is None or not self._can_measure():
            return False
        if self._adapting is not None or self.policy.due or self._adapted_at is None:
            return True
        return self._since(self._adapted_at) + in_steps >= self._interval

    def _verification_due(self, in_steps: int) -> bool:
        if self.verifier is None or not self._can_measure():
            return False
        if self.verifier.at is None:
            return self.adapter is None  # an adaptation verifies its own plan
        if self.config.watch_interval == 0 or self.policy.follows_gradient:  # which watches by its own draws
            return False
        # a model changes most at first: outputs saturate, activations grow
        interval = min(self.config.watch_interval, max(1, self.verifier.at))
        return self.step + in_steps - self.verifier.at >= interval

    def _since(self, adapted_at: int) -> int:
        """Optimizer steps begun since the last adaptation, or forwards where none was seen yet."""
        if self.optimizer_steps is None or not self.optimizer_steps.seen:
            return self.step - adapted_at
        return self.optimizer_steps.begun(self.step)

    def drawing_due(self, in_steps: int = 0) -> bool:
        """Whether the gradient should be drawn this many steps from now."""
        return self.adapter is not None and self._can_measure() and self.policy.drawing_due(self.step + in_steps)

    def _can_measure(self) -> bool:
        """Whether anything can be measured now; the same on all ranks."""
        if torch.is_inference_mode_enabled():  # in which no graph can be built, unlike under no_grad()
            return False
        return not self._is_lazy() and self._is_trained() and not self._joined.uneven

    def _is_lazy(self) -> bool:
        """Whether a parameter or buffer of the model has yet to take its shape from the first forward, the job's own.

        A measurement before that would draw the initial values in its place.
        """
        if self._lazy:
            self._lazy = any(is_lazy(tensor) for tensor in (*self.model.parameters(), *self.model.buffers()))
        return self._lazy

    def _is_trained(self) -> bool:
        """Whether any parameter of the model gets a gradient: that of a frozen one is what no rounding could move."""
        return any(parameter.requires_grad for parameter in self.model.parameters())

    def probe_examples(self, wanted: int) -> int:
        """Examples to measure on; the whole batch if another shape would recompile the model's regions."""
        return sys.maxsize if has_compiled_parts(self.model) else wanted

    def start(self, forward: Callable[[], Any]) -> None:
        """Before the first step where nothing can be measured yet. forward: runs the model as that step will."""
        if self.adapter is not None and not self._is_lazy() and not self.plan.bits:
            if self.policy.needs_step_bytes and not self.meet("counting the bytes of the first step"):
                return
            with self.measurement():
                self.adapter.start(forward)

    def draw(self, loss: Callable[[], Any], unit: float | None = None) -> None:
        """Draw the gradient if that is due and no adaptation is; an adaptation measures it anyway."""
        if self.adapter is None or not self.drawing_due() or self._adaptation_due():
            return
        if self.meet("measuring the gradient"):
            with self.measurement():
                self.adapter.draw(self.step, loss, unit)

    def measure(self, batch: ProbeBatch) -> None:
        """Adapt or verify, whichever is due."""
        if self.adapter is not None:
            self.adapter.prepare(batch)
        if self._adaptation_due():
            self.adapt(batch)
        else:
            self.verify(batch)

    def verify(self, batch: ProbeBatch, *, provisional: bool = False) -> None:
        """Compare the gradient under the current plan with the exact one; what causes a fault is stored exactly.

        Where bits adapt they do so instead, as sensitivities may have changed. provisional: they cannot, as the loss is
        not known yet.
        """
        if self.verifier is None or self.hooks is None or not self._can_measure():
            return
        if not self.meet("comparing the gradient with the exact one"):
            return
        search = provisional or self.adapter is None
        with self.measurement():
            verdict = self.verifier.verify(batch, self.plan, self.step, provisional=provisional, search=search)
        if verdict.fault is not None:
            if distributed.is_first(self.groups):
                _log.warning("bits are chosen anew before their time: under the plan in use %s", verdict.fault)
            self.adapt(batch, Haste.FAULT)
        if verdict.found:
            self.hooks.plan = self.plan.updated(dict.fromkeys(verdict.found))
            for group in self.groups:
                distributed.check_agreement(self.plan.bits, group=group)
            adaptation = Adaptation({}, {}, 0.0, 0.0, {}, kept=True, stored_exactly=verdict.found)
            self._note(adaptation)

    def adapt(self, batch: ProbeBatch, haste: Haste = Haste.NONE) -> None:
        """Measure, and set the plan; or do a share of it, see [Note: shares] in adaptation/adapter.py.

        With a policy that does not adapt, its plan is verified. Raises PlanMismatchError when ranks disagree.
        """
        if self.hooks is None or not self.enabled:
            return
        if self.adapter is None:
            self.verify(batch)
            return
        if self._is_lazy():
            raise ValueError(
                "the model has lazy modules that no forward has initialised, expected a model that has run once: call "
                "calibrate() after the first step"
            )
        if not self.meet("adapting bits"):
            return
        before, adaptation = self.plan.bits, self._share_of_adaptation(self.adapter, batch, haste)
        if adaptation is None:
            return
        self._use(adaptation, before)

    def _share_of_adaptation(self, adapter: Adapter, batch: ProbeBatch, haste: Haste) -> Adaptation | None:
        """Go on with the adaptation that is under way, or begin one; its outcome, if it is complete."""
        adapting = self._adapting if haste is Haste.NONE else None
        self._adapting = None  # an exception ends it
        if adapting is None:
            adapting = adapter.adapt(haste)
        with self.measurement():
            outcome = adapting.go_on(batch, self.step)
        if outcome is None:
            self._adapting = adapting
        return outcome

    def _use(self, adaptation: Adaptation, before: Mapping[str, Bits]) -> None:
        """Set the plan of an adaptation. before: bits until now."""
        self.adaptation = adaptation
        # The bits used until now are compared as well: a rank that went its own way since (another state loaded, say)
        # would otherwise be put right here without a word.
        in_use = {f"{name} (in use until now)": bits for name, bits in before.items()}
        plan = Plan({**before, **adaptation.plan}, adaptation.default_bits)
        for group in self.groups:
            distributed.check_agreement({**in_use, **plan.bits}, group=group)
        if self.hooks is not None:
            self.hooks.plan = plan
        self.sensitivity = {**self.sensitivity, **adaptation.sensitivity}
        self._adapted_at = self.step
        if self.optimizer_steps is not None:
            self.optimizer_steps.restart(self.step)
        self._joined.mark()
        self._interval = self._interval_after(adaptation)
        self._note(adaptation)

    def _interval_after(self, adaptation: Adaptation) -> int:
        """Optimizer steps until the next adaptation."""
        usual = self.config.adapt_interval
        if adaptation.refuted or not adaptation.sensitivity:  # an error or too little memory, perhaps of this batch
            self._failed += 1
            return min([usual, *_RETRIES[self._failed - 1 : self._failed]])
        self._failed = 0
        # an error bound is watched at adaptations, and the gradient shrinks while bits stand still
        settled = adaptation.kept and adaptation.gradient_error is None
        return min(2 * max(self._interval, usual), _LONGEST_INTERVAL * usual) if settled else usual

    def _note(self, adaptation: Adaptation) -> None:
        entry = adaptation.to_dict(self.step)
        self.history[:] = bounded([*self.history, entry])
        self._progress.adapted(adaptation, self.plan)
        if self.run_log is not None:
            self.run_log.adapted(entry, self.plan.bits)

    # -- state --------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """Everything that a resumed run needs to go on as this one will. An adaptation under way begins anew."""
        self._adapting = None
        return State(
            self.step,
            self._adapted_at,
            self._interval,
            self.plan,
            self.sensitivity,
            self.history,
            {} if self.hooks is None else self.hooks.state_dict(),
            {} if self.adapter is None else self.adapter.state_dict(),
            None if self.optimizer_steps is None else self.optimizer_steps.state,
            {} if self.verifier is None else self.verifier.state_dict(),
            self._failed,
        )

    def load(self, state: State) -> None:
        """Go on from a state. Raises StateError for a value in it, and changes nothing then."""
        learnt: LearntNames | None = None if self.hooks is None else self.hooks.parse_state(state.hooks)
        adapted: LearntByAdapting | None = None if self.adapter is None else self.adapter.parse_state(state.adapter)
        verified: LearntByVerifying = Verifier.parse_state(state.verifier)
        self._adapting = None
        self.step, self._adapted_at, self._interval = state.step, state.adapted_at, state.interval
        self._failed = state.failed
        self.sensitivity, self.history = dict(state.sensitivity), list(state.history)
        self._plan_while_off = state.plan
        if self.hooks is not None and learnt is not None:
            self.hooks.plan = self.policy.restored_plan(state.plan)
            self.hooks.load_state(learnt)
        if self.adapter is not None and adapted is not None:
            self.adapter.load_state(adapted)
        if self.verifier is not None:
            self.verifier.load_state(verified)
        if self.optimizer_steps is not None:
            # as many as forwards, in a state that says nothing
            forwards = 0 if state.adapted_at is None else state.step + 1 - state.adapted_at
            self.optimizer_steps.load(state.optimizer_steps, forwards)

    def save_plan(self, path: str) -> None:
        """See Controller.save_plan()."""
        write_plan_file(path, self.state(), self.model, self.config)

    def close(self) -> None:
        """Take all hooks off the model."""
        _attached.discard(self)
        self._joined.close()
        if self.run_log is not None:
            self.run_log.close(self._clock.take())
        if self.hooks is not None:
            self.hooks.close()
        if self.optimizer_steps is not None:
            self.optimizer_steps.close()


# By weak references: those that are attached live as long as their hooks on a model do, whoever dropped the controller.
_attached: WeakSet[Schedule] = WeakSet()


def is_attached(model: nn.Module) -> bool:
    """Whether a model, a part of it, or what it is a part of is attached and was not detached."""
    modules = set(map(id, model.modules()))
    return any(id(module) in modules for schedule in list(_attached) for module in schedule.model.modules())


def _about(model: nn.Module, config: Config) -> tuple[int, dict[str, Any], torch.device]:
    """(this process's rank, the run as run.json says it, where its memory is)"""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    about = {
        **_facts_of(config),
        "model": type(distributed.unwrap(model)).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "world_size": distributed.world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "config": config.to_dict(),
    }
    return distributed.rank(), about, device


def _facts_of(config: Config) -> dict[str, str]:
    """What all ranks that share a plan must have in common."""
    settings = {f"Config.{key}": repr(value) for key, value in config.to_dict().items() if key not in _OF_A_RANK}
    library = getattr(sys.modules[__package__.partition(".")[0]], "__version__", "unknown")
    return {"gact_dist": library, "torch": VERSION, **settings}
