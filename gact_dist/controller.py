"""The handle that a user holds: composes engine, sensitivity, allocation and agreement, and keeps the schedule."""

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed, state_text
from .adaptation import Adaptation, Adapter
from .attachment import check_inlined, data_parallel_groups, settings
from .config import Config
from .distributed import learning_shapes, tensor_parallel_groups, unwrap
from .hooks import Engine, has_compiled_parts
from .offload import open_offload
from .policies import Bits, plan_from, policy_of
from .report import MemoryReport, build_report
from .sensitivity import Observation, ProbeBatch

_log = logging.getLogger(__name__)
_LONGEST_INTERVAL = 8  # in adapt_intervals

_installed: set["Controller"] = set()
"""Controllers whose hooks are on: one that the user drops must not take some other hook off when it is collected."""


class Lifecycle(Enum):
    """What a controller may be asked to do."""

    ATTACHED = "attached"  # step() compresses one forward at a time
    FOLLOWING = "following"  # every forward of the model is a step, from follow() to detach()
    INSTALLED = "installed"  # the hooks stay on from install_hook() to uninstall_hook(); iterate() ends an iteration
    DETACHED = "detached"  # the model is as it was; only report(), plan and state_dict() still answer


def attach(
    model: nn.Module, level: str | None = None, *, config: Config | None = None, process_group: Any = None
) -> "Controller":
    """Attach activation compression to a model and return its controller; the model itself is not changed.

    model: as it will be trained: plain, in DistributedDataParallel, FSDP1 or FSDP2, a DeepSpeed engine, a pipeline
    stage; split for tensor parallelism and given to torch.compile before, not after. level: a name in gact_dist.LEVELS,
    such as "L2"; or config: all settings; not both. process_group: the data-parallel group whose ranks share one plan
    (a ProcessGroup or a DeviceMesh of one dimension: of HSDP's two the flattened one, mesh._flatten("dp")); the default
    group if there is one.
    Raises TypeError or ValueError when one of these cannot be used.
    """
    return Controller(model, level, config=config, process_group=process_group)


class Controller:
    """Activation compression of one model (see attach)."""

    def __init__(
        self, model: nn.Module, level: str | None = None, *, config: Config | None = None, process_group: Any = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        self.config = settings(level, config)
        check_inlined(self.config, model)
        self._model = model
        tensor_parallel = tensor_parallel_groups(model)
        data_parallel = data_parallel_groups(process_group, tensor_parallel)
        self._groups = [*data_parallel, *tensor_parallel]
        sharing = math.prod(distributed.world_size(group) for group in self._groups)
        self._state_key = state_text.key_of(model, shared_by_all=sharing == distributed.world_size())
        rank = distributed.rank(*data_parallel) if data_parallel else 0
        self._engine = None
        if self.config.policy != "off":
            offload = self.config.offload
            storage = open_offload(model, offload, distributed.world_size()) if offload.enabled else None
            self._engine = Engine(model, self.config, rank, storage)
        self._adapter: Adapter | None = None
        if self._engine is not None and policy_of(self.config).adapts:
            self._adapter = Adapter(model, self._engine, data_parallel, self._groups)
        self._promise = None if self._adapter is None else self._adapter.error_budget
        self._state = Lifecycle.ATTACHED
        self._step = 0
        self._adapted_at: int | None = None
        self._interval = self.config.adapt_interval
        self._plan: dict[str, Bits] = {}
        self._sensitivity: dict[str, float] = {}
        self._installed = ExitStack()
        self._hooks = ExitStack()
        self._forward_ran = False
        self._measuring = False
        self._in_step = False  # between the hooks of a forward that is followed
        self._observation: Observation | None = None
        self._candidate: Observation | None = None
        self.adaptation: Adaptation | None = None
        """outcome of the last adaptation, None before the first"""
        self.history: list[dict[str, Any]] = []
        """every adaptation of the job in plain values: step, whether the plan was kept, average bits, predicted
        variance, the bits and the sensitivity of each tensor; a line of JSON each. It is part of the state; tensors
        only of the last hundred"""

    # -- a step -------------------------------------------------------------------------------------------------

    @contextmanager
    def step(
        self,
        loss_fn: Callable[[Any], Tensor] | None = None,
        batch: Any = None,
        *,
        sample_index: Tensor | Sequence[int] | None = None,
    ) -> Iterator[None]:
        """Compress what autograd saves inside the context, which should hold one forward; backward may follow after it.

        loss_fn(batch): returns the scalar loss; when an adaptation is due, sensitivity is measured with it on the first
        samples of the batch before the context is entered. All ranks must give it, or none. Without it the plan stays
        as it is (uniform at first).
        sample_index: integers [samples of the batch] on the CPU, their numbers in the data set. With policy actnn the
        size of each sample's gradient is then remembered and says, when the sample comes again, how many bits it gets;
        other policies have no use for it.
        """
        self._expect(Lifecycle.ATTACHED, "step()", "call uninstall_hook() first, or use iterate()")
        self._step += 1
        if self._engine is None:
            yield
            return
        watched = self._engine.packer.begin(sample_index, batch)
        if loss_fn is not None:
            self._sample_gradient(partial(loss_fn, batch))
            if self._due():
                self.calibrate(loss_fn, batch, samples=self.config.calibration_samples)
        elif self._adapter is not None:
            self._adapter.idle(self._step)
        self._engine.begin(self._step)
        with self._engine.hooks(), watched:
            yield
        self._watch()

    def follow(self) -> "Controller":
        """From now on every forward of the model that builds a graph is a step, without a line in the training loop.

        Adaptations need no loss function: they use the loss's gradient at the model's outputs, as the job's backward
        had it in the step before (see sensitivity/probe.py). For loops that belong to others: a trainer, an engine, a
        pipeline schedule. Ends with detach(). Returns the controller itself.
        """
        self._expect(Lifecycle.ATTACHED, "follow()", "call detach() and attach() again, or uninstall_hook()")
        self._state = Lifecycle.FOLLOWING
        begin = self._model.register_forward_pre_hook(self._begin_followed, prepend=True, with_kwargs=True)
        end = self._model.register_forward_hook(self._end_followed, with_kwargs=True, always_call=True)
        self._installed.callback(begin.remove)
        self._installed.callback(end.remove)
        return self

    def _begin_followed(self, _: nn.Module, args: tuple, kwargs: dict) -> None:
        self._hooks.close()  # of a forward that raised before its end
        self._in_step = False
        if self._engine is None or not torch.is_grad_enabled() or self._measuring or learning_shapes():
            return
        self._step += 1
        if self._observation is not None and (self._due() or self._sampling_due()):
            complete = self._observation.complete
            for group in self._groups:
                complete = distributed.all_ranks(complete, group)
            if complete:
                observation, self._observation = self._observation, None
                self._use(observation, partial(self._model, *args, **kwargs))
        if self._step == 1 and self._adapter is not None:
            with self._measurement():
                self._adapter.start(partial(self._model, *args, **kwargs))
        # one whose backward has not come by (two forwards before one backward) gives way to this forward
        self._candidate = None
        if self._due(in_steps=1) or self._sampling_due(in_steps=1):
            # a promise about the gradient is measured on whole batches
            samples = self.config.calibration_samples if self._promise is None else sys.maxsize
            self._candidate = Observation((args, kwargs), self._probe_samples(samples))
        self._engine.begin(self._step)
        self._hooks = ExitStack()
        self._hooks.enter_context(self._engine.hooks())
        self._in_step = True

    def _end_followed(self, _: nn.Module, args: tuple, kwargs: dict, outputs: Any) -> None:
        if self._measuring or not self._in_step:
            return
        self._hooks.close()
        self._watch()
        if self._candidate is not None and self._candidate.outputs(outputs):
            self._observation = self._candidate
        self._candidate = None

    def _use(self, observation: Observation, whole: Callable[[], Any]) -> None:
        """Sample the gradient of an observed step, or adapt. whole: runs the forward to come."""
        if self._promise is not None:
            self._sample_gradient(partial(observation.loss, self._model), observation.squared_gradient)
        if self._due():
            samples = self._probe_samples(self.config.calibration_samples)
            unit = None if self._promise is None else observation.squared_gradient
            loss_of = partial(Observation.loss, model=self._model)
            self._adapt(ProbeBatch(loss_of, observation, samples, forward=whole, unit=unit))

    def calibrate(self, loss_fn: Callable[[Any], Tensor], batch: Any, samples: int = 8) -> None:
        """Measure sensitivity now, on the first `samples` samples of a batch, and set the plan. A collective call.

        loss_fn(batch): returns the scalar loss. The job is left untouched: gradients, random numbers, buffers.
        Raises ValueError when the loss is no scalar with a graph, PlanMismatchError when ranks disagree.
        """
        self._expect_not_detached("calibrate()")
        if samples < 1:
            raise ValueError(f"samples is {samples}, expected at least 1")
        self._adapt(ProbeBatch(loss_fn, batch, self._probe_samples(samples)))

    def _probe_samples(self, wanted: int) -> int:
        """Samples to measure on; all of the batch where another shape would compile the model's regions anew."""
        if has_compiled_parts(self._model):
            return sys.maxsize
        return wanted if self._adapter is None else min(wanted, self._adapter.most_samples)

    def _watch(self) -> None:
        if self._adapter is not None:
            self._adapter.watch()

    def _due(self, in_steps: int = 0) -> bool:
        if self._adapter is None:
            return False
        if self._promise is not None and self._promise.due:
            return True
        return self._adapted_at is None or self._step + in_steps - self._adapted_at >= self._interval

    def _sampling_due(self, in_steps: int = 0) -> bool:
        return self._promise is not None and self._promise.sampling_due(self._step + in_steps)

    def _sample_gradient(self, loss: Callable[[], Any], unit: float | None = None) -> None:
        """Look whether a promise about the gradient holds, if that is due and no adaptation is, which looks as well."""
        if self._promise is not None and self._sampling_due() and not self._due():
            with self._measurement():
                self._promise.sample(self._step, loss, unit)

    @contextmanager
    def _measurement(self) -> Iterator[None]:
        """Forwards inside it are ours, not the job's."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    def _adapt(self, probe: ProbeBatch) -> None:
        if self._adapter is None:
            return
        with self._measurement():
            self.adaptation = self._adapter.adapt(probe, self._step)
        # The plan in use until now is compared as well: a rank that went its own way since (another state loaded, say)
        # would otherwise be put right here without a word.
        in_use = {f"{name} (in use until now)": bits for name, bits in self._plan.items()}
        plan = {**self._plan, **self.adaptation.plan}
        for group in self._groups:
            distributed.check_agreement({**in_use, **plan}, group=group)
        self._plan = self._adapter.engine.plan = plan
        self._sensitivity = {**self._sensitivity, **self.adaptation.sensitivity}
        self._adapted_at = self._step
        # a promise about the gradient is watched at adaptations, and the gradient shrinks while bits stand still
        settled = self.adaptation.kept and self.adaptation.gradient_error is None
        longest = _LONGEST_INTERVAL * self.config.adapt_interval
        self._interval = min(2 * self._interval, longest) if settled else self.config.adapt_interval
        self.history.append(self.adaptation.to_dict(self._step))

    # -- hooks that stay on (the interface of GACT's controller) --------------------------------------------------

    def install_hook(self) -> None:
        """Compress everything that autograd saves in this thread from now on, until uninstall_hook()."""
        self._expect(Lifecycle.ATTACHED, "install_hook()", "it is installed already")
        self._state = Lifecycle.INSTALLED
        _installed.add(self)
        handle = unwrap(self._model).register_forward_pre_hook(self._note_forward)
        self._installed.callback(handle.remove)
        self._open_iteration()

    def iterate(self, fwdbwdprop: Callable[[], Any]) -> None:
        """End an iteration: adapt when due, and give the next iteration's rounding its own random numbers.

        fwdbwdprop: runs forward, zero_grad and backward (on the loss, by loss.backward()). If the model's forward has
        not run since the last iterate, the closure is the iteration and is run as such; otherwise it is only measured
        with, which leaves gradients, random numbers and buffers untouched.
        """
        self._expect(Lifecycle.INSTALLED, "iterate()", "call install_hook() first")
        closure_is_the_iteration = not self._forward_ran
        self._hooks.close()
        self._watch()
        self._step += 1
        self._sample_gradient(fwdbwdprop)
        if self._due():
            self._adapt(ProbeBatch(lambda _: fwdbwdprop(), None))
        self._open_iteration()
        if closure_is_the_iteration:
            fwdbwdprop()
            self._forward_ran = False

    def uninstall_hook(self) -> None:
        """Undo install_hook(); does nothing if it is not installed."""
        if self._state is Lifecycle.INSTALLED:
            self._hooks.close()
            self._installed.close()
            _installed.discard(self)
            self._state = Lifecycle.ATTACHED

    def _note_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation between two iterations is not an iteration
            self._forward_ran = True

    def _open_iteration(self) -> None:
        self._forward_ran = False
        self._hooks = ExitStack()
        if self._engine is not None:
            self._engine.begin(self._step)
            self._hooks.enter_context(self._engine.hooks())

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Bits]:
        """{name of saved tensor: bits}, None for stored exactly; empty before the first adaptation (then uniform).

        With policy actnn bits may be a tuple: the widths of equal shares of the samples, those ranked first at first.
        """
        return dict(self._plan)

    def report(self) -> MemoryReport:
        """What the last step on this rank kept for backward, tensor by tensor. With offload it waits for the device."""
        if self._engine is None:
            return MemoryReport(0, 0, ())
        engine = self._engine
        error = None if self.adaptation is None else self.adaptation.gradient_error
        return build_report(engine.ledger.rows, engine.ledger.exact_bytes, self._sensitivity, error, engine.offloaded())

    def state_dict(self) -> dict[str, str]:
        """Everything that a resumed run needs to go on as this one will: {"gact_dist": one JSON text}.

        It is one value because torch.distributed.checkpoint loads only keys that the loading side has already, and the
        names of a plan are not known there. Where only some ranks hold these modules, as those of a pipeline stage do,
        a number behind the key stands for the modules' names. Under follow(), what was observed for an adaptation that
        is due in the next step is dropped, for it is not part of the state: this run and a resumed one both observe the
        next forward and adapt a step later.
        """
        self._observation = None
        fields = {
            "config": self.config.to_dict(),
            "step": self._step,
            "adapted_at": self._adapted_at,
            "interval": self._interval,
            "plan": self._plan,
            "sensitivity": self._sensitivity,
            "engine": self._engine.state_dict() if self._engine is not None else {},
            "adapter": self._adapter.state_dict() if self._adapter is not None else {},
            "history": state_text.bounded(self.history),
        }
        return state_text.write(self._state_key, fields)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a state_dict(), at the same or another world size.

        Raises ValueError for anything else, and for a state of other modules, such as those of another pipeline stage.
        """
        loaded = state_text.read(state, self._state_key, self._model)
        self._step, self._adapted_at, self._interval = loaded["step"], loaded["adapted_at"], loaded["interval"]
        self._plan = plan_from(loaded["plan"], shares=self.config.policy == "actnn")
        self._sensitivity, self.history = loaded["sensitivity"], loaded["history"]
        if self._engine is not None:
            self._engine.plan = self._plan
            self._engine.load_state_dict(loaded["engine"])
        if self._adapter is not None:
            self._adapter.load_state_dict(loaded["adapter"])

    def detach(self) -> None:
        """Take all hooks off the model; graphs that are alive can still run backward. Calling it again does nothing."""
        self.uninstall_hook()
        self._hooks.close()
        self._installed.close()
        self._observation = None
        if self._engine is not None and self._state is not Lifecycle.DETACHED:
            self._engine.close()
        self._state = Lifecycle.DETACHED

    def _expect(self, state: Lifecycle, what: str, mend: str) -> None:
        self._expect_not_detached(what)
        if self._state is not state:
            raise RuntimeError(
                f"{what} needs a controller that is {state.value}, this one is {self._state.value}: {mend}"
            )

    def _expect_not_detached(self, what: str) -> None:
        if self._state is Lifecycle.DETACHED:
            raise RuntimeError(f"{what} on a controller that was detached: call gact_dist.attach(model) for a new one")
