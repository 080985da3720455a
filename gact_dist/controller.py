"""The handle that a user holds."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

from torch import Tensor, nn

from ._fields import StateError
from .adaptation import Adaptation, Haste
from .config import DISABLE, Config, disabled_by_environment, settings_of
from .policies import Bits
from .report import MemoryReport, build_report, peak_bytes
from .sensitivity import ProbeBatch
from .steps import Following, Iterations, Schedule, default_level, read_state, state_key, write_state

_log = logging.getLogger(__name__)


def _check_loss_fn(loss_fn: Any) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}, expected a function that is given the batch, runs the model and "
            "returns the loss: lambda batch: criterion(model(batch[0]), batch[1])"
        )


def _no_controller() -> None:
    """What a pickled model has in place of its controller."""


class Lifecycle(Enum):
    """What a controller may be asked to do."""

    ATTACHED = "attached"  # step() compresses one forward at a time
    FOLLOWING = "following"  # every forward of the model is a step, from follow() to detach()
    INSTALLED = "installed"  # the hooks stay on from install_hook() to uninstall_hook(); iterate() ends an iteration
    DETACHED = "detached"  # the model is as it was; only report(), plan and state_dict() still answer


def attach(
    model: nn.Module,
    level: str | None = None,
    *,
    config: Config | None = None,
    process_group: Any = None,
    **settings: Any,
) -> "Controller":
    """Attach activation compression to a model and return its controller; the model itself is not changed.

    Args:
        model: as it will be trained: plain, in DistributedDataParallel, FSDP1 or FSDP2, a DeepSpeed engine, a pipeline
            stage; split for tensor parallelism and given to torch.compile before, not after.
        level: a name in gact_dist.LEVELS, such as "L2", which is the default.
        config: all settings, in place of a level and single ones.
        process_group: the data-parallel group whose ranks share one plan: a ProcessGroup, or a DeviceMesh of one
            dimension (of HSDP's two the flattened one, mesh._flatten("dp")). The default group if there is one.
        settings: fields of Config that are to be other than in the level: attach(model, "L2", adapt_interval=500).

    Raises:
        TypeError, ValueError: one of these cannot be used.
    """
    return Controller(model, level, config=config, process_group=process_group, **settings)


class Controller:
    """Activation compression of one model (see attach)."""

    def __init__(
        self,
        model: nn.Module,
        level: str | None = None,
        *,
        config: Config | None = None,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        self.config = settings_of(level, config, settings, default_level())
        self._schedule = Schedule(model, self.config, process_group)
        self._state_key = state_key(model, self._schedule.shared_by_all)
        self._state = Lifecycle.ATTACHED
        self._following: Following | None = None
        self._iterations: Iterations | None = None
        disabled_by_environment(strict=True)
        self._obey_environment()

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

        Args:
            loss_fn: loss_fn(batch) returns the scalar loss. When an adaptation is due, sensitivity is measured with it
                on the first examples of the batch before the context is entered. All ranks must give it, or none.
                Without it the plan stays as it is (uniform at first).
            batch: the argument of loss_fn.
            sample_index: integers [examples of the batch] on the CPU, their numbers in the data set. With policy actnn
                the size of each example's gradient is then remembered and says, when the example comes again, how many
                bits it gets; other policies have no use for it.
        """
        mend = "under follow() every forward is a step; after install_hook() use iterate() or uninstall_hook()"
        self._expect(Lifecycle.ATTACHED, "step()", mend)
        _check_loss_fn(loss_fn)
        self._obey_environment()
        schedule = self._schedule
        if schedule.hooks is None or not schedule.enabled or not schedule.threads.enter():
            yield
            return
        try:
            schedule.next_step()
            schedule.hooks.given.begin_step(batch)
            watched = schedule.hooks.encoder.examples.begin(sample_index, batch)
            if loss_fn is not None:
                schedule.draw(partial(loss_fn, batch))
                if schedule.due():
                    examples = schedule.probe_examples(self.config.calibration_samples)
                    schedule.measure(ProbeBatch(loss_fn, batch, examples))
            elif schedule.adapter is not None:
                schedule.adapter.idle(schedule.step)
            with schedule.forward(), watched:
                yield
            schedule.watch()
        finally:
            schedule.threads.leave()

    def follow(self) -> "Controller":
        """From now on every forward of the model that builds a graph is a step, without a line in the training loop.

        Adaptations need no loss function: they use the loss's gradient at the model's outputs, as the job's backward
        had it in the step before. For loops that are not your own: a trainer, an engine, a pipeline schedule. Ends with
        detach(). Returns the controller itself.
        """
        # See [Note: observed loss] in sensitivity/probe.py.
        self._expect(Lifecycle.ATTACHED, "follow()", "call detach() and attach() again, or uninstall_hook()")
        self._following = Following(self._schedule, self._obey_environment)
        self._state = Lifecycle.FOLLOWING
        return self

    def calibrate(self, loss_fn: Callable[[Any], Tensor], batch: Any, samples: int = 8) -> None:
        """Measure sensitivity now and set the plan. A collective call.

        The job is left untouched: gradients, random numbers, buffers.

        Args:
            loss_fn: loss_fn(batch) returns the scalar loss.
            batch: the argument of loss_fn.
            samples: how many examples of the batch are measured, from the first on.

        Raises:
            ValueError: the loss is no scalar with a graph.
            PlanMismatchError: the ranks disagree.
            RuntimeError: the loss function raised an error on another rank, which is named; there that error is raised.
        """
        self._expect_not_detached("calibrate()")
        _check_loss_fn(loss_fn)
        if samples < 1:
            raise ValueError(f"samples is {samples}, expected at least 1")
        self._obey_environment()
        if self._schedule.hooks is not None:
            self._schedule.hooks.given.begin_step(batch)
        self._schedule.adapt(ProbeBatch(loss_fn, batch, self._schedule.probe_examples(samples)), Haste.CALIBRATION)

    def log(self, **values: float | Tensor) -> None:
        """Add numbers of the current step, such as loss=loss, to the log in Config.run_dir; nothing without that.

        A tensor of one element is read when it has arrived: nothing waits for a device. Call it after the step's
        forward. With policy off each call is a step, so that an untouched run can be compared with.
        """
        self._schedule.log(values)

    # -- hooks that stay on (the interface of GACT's controller) --------------------------------------------------

    def install_hook(self) -> None:
        """Compress everything that autograd saves in this thread from now on, until uninstall_hook()."""
        self._expect(Lifecycle.ATTACHED, "install_hook()", "it is installed already")
        self._iterations = Iterations(self._schedule, self._obey_environment)
        self._state = Lifecycle.INSTALLED

    def iterate(self, fwdbwdprop: Callable[[], Any]) -> None:
        """End an iteration: adapt when due, and give the next iteration's rounding its own random numbers.

        Args:
            fwdbwdprop: runs forward, zero_grad and backward (on the loss, by loss.backward()). If the model's forward
                has not run since the last iterate, the closure is the iteration and is run as such; otherwise it is
                only used to measure, which leaves gradients, random numbers and buffers untouched.
        """
        self._expect(Lifecycle.INSTALLED, "iterate()", "call install_hook() first")
        if self._iterations is not None:
            self._iterations.iterate(fwdbwdprop)

    def uninstall_hook(self) -> None:
        """Undo install_hook(). Does nothing if it is not installed."""
        if self._iterations is not None:
            self._iterations.close()
            self._iterations = None
            self._state = Lifecycle.ATTACHED

    # -- off and on -----------------------------------------------------------------------------------------------

    def disable(self) -> None:
        """Leave the job as it is, bit for bit, from the next forward on: nothing is compressed or measured, no hook is
        on the model, and no rank waits for another. Every rank must call it together.

        What was learnt stays, in this object and in its state. Graphs that are alive can still run backward. Until
        enable(). The environment variable GACT_DISABLE does the same from the first forward on before which it is 1.
        """
        self._expect_not_detached("disable()")
        self._switch(False, "disable()")

    def enable(self) -> None:
        """Undo disable(), from the next forward on. It stays off while GACT_DISABLE is 1."""
        self._expect_not_detached("enable()")
        if disabled_by_environment():
            _log.warning("enable() was called, but GACT_DISABLE is 1: nothing is compressed")
            return
        self._switch(True, "enable()")

    def _obey_environment(self) -> None:
        """Before a forward: GACT_DISABLE may have become 1."""
        if disabled_by_environment():
            self._switch(False, DISABLE)

    def _switch(self, on: bool, why: str) -> None:
        schedule = self._schedule
        if schedule.enabled == on or schedule.hooks is None:
            return
        schedule.switch(on, why)
        if self._iterations is not None:
            self._iterations.switch()
        schedule.between_forwards(self._put_hooks)

    def _put_hooks(self) -> None:
        self._schedule.put_hooks()
        if self._following is not None:
            self._following.close()
            if self._schedule.enabled:
                self._following.resume()

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Bits]:
        """{name of saved tensor: bits}, None for stored exactly; empty before the first adaptation (then uniform).

        With policy actnn bits may be a tuple: the widths of equal shares of the examples, highest rank first.
        """
        return dict(self._schedule.plan.bits)

    @property
    def adaptation(self) -> Adaptation | None:
        """Outcome of the last adaptation, None before the first."""
        return self._schedule.adaptation

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every adaptation of the job in plain values: step, whether the plan was kept, average bits, predicted
        variance, the bits and the sensitivity of each tensor; a line of JSON each, and one with an "event" for every
        disable() and enable(). It is part of the state; tensors only of the last hundred."""
        return self._schedule.history

    @property
    def exact_because(self) -> dict[str, str]:
        """{name of saved tensor: why its backward must not read it rounded}, where a rule says so."""
        return {} if self._schedule.hooks is None else dict(self._schedule.hooks.reasons)

    def report(self) -> MemoryReport:
        """What the last step on this rank kept for backward, tensor by tensor. With offload it waits for the device."""
        schedule = self._schedule
        if schedule.hooks is None or not schedule.enabled:
            return MemoryReport(0, 0, ())
        account = schedule.hooks.account
        error = None if self.adaptation is None else self.adaptation.gradient_error
        return build_report(account.rows, account.exact_bytes, schedule.sensitivity, error, schedule.hooks.offloaded())

    def scalars(self) -> dict[str, float]:
        """Numbers of the last step on this rank and of the last adaptation, for the logger of a framework or of a loop.

        gact/retained_bytes and gact/exact_bytes: what is kept for backward, and what would be without gact_dist;
        gact/ratio of the two; gact/peak_bytes: the most memory of the process so far, allocated on its GPU or resident
        on a CPU; gact/average_bits and gact/predicted_variance (of the gradient, by rounding) once bits have adapted;
        gact/gradient_error with policy acgc. With offload it waits for the device.
        """
        report, adaptation = self.report(), self.adaptation
        found: dict[str, float | None] = {
            "retained_bytes": report.retained_bytes,
            "exact_bytes": report.exact_bytes,
            "ratio": report.ratio,
            "peak_bytes": self._peak_bytes(),
        }
        if adaptation is not None and adaptation.sensitivity:
            found["average_bits"] = adaptation.average_bits
            found["predicted_variance"] = adaptation.predicted_variance
        if report.gradient_error is not None:
            found["gradient_error"] = report.gradient_error.measured
        return {f"gact/{name}": value for name, value in found.items() if value is not None}

    def _peak_bytes(self) -> int | None:
        parameter = next(self._schedule.model.parameters(), None)
        return None if parameter is None else peak_bytes(parameter.device)

    def state_dict(self) -> dict[str, str]:
        """Everything that a resumed run needs to go on as this one will: {"gact_dist": one JSON text}.

        It is one value because torch.distributed.checkpoint loads only keys that the loading side has already, and the
        names of a plan are not known there. Where only some ranks hold these modules, as those of a pipeline stage do,
        a number behind the key stands for the modules' names. Under follow(), what was observed for an adaptation that
        is due in the next step is dropped, as it is not part of the state: this run and a resumed one both observe the
        next forward and adapt a step later.
        """
        if self._following is not None:
            self._following.forget()
        return write_state(self._state_key, self._schedule.state(), self.config.to_dict())

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a state_dict(), at the same or another world size, and of an older version of gact_dist as well.

        Raises:
            ValueError: anything else, or a state of other modules, such as those of another pipeline stage. Nothing is
                changed then.
        """
        try:
            schedule, default = self._schedule, self._schedule.policy.first_plan.default
            interval = self.config.adapt_interval
            schedule.load(read_state(state, self._state_key, schedule.model, interval, default))
        except StateError as error:
            raise ValueError(
                f"state cannot be used: {error}. Pass what state_dict() returned, or load nothing; nothing was changed"
            ) from None

    def save_plan(self, path: str) -> None:
        """Write the current plan to a file, for Config.plan_file of another run of this model.

        Unlike state_dict() it says nothing of how far this run is. Raises OSError where the file cannot be written.
        """
        self._schedule.save_plan(path)

    def detach(self) -> None:
        """Take all hooks off the model; graphs that are alive can still run backward. Calling it again does nothing."""
        if self._state is Lifecycle.DETACHED:
            return
        self.uninstall_hook()
        if self._following is not None:
            self._following.close()
        self._schedule.close()
        self._state = Lifecycle.DETACHED

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """The copy of a model that holds its controller has None in its place. See [Note: copies] in _own_hooks.py."""
        return None

    def __reduce__(self) -> Any:
        return _no_controller, ()

    def _expect(self, state: Lifecycle, what: str, mend: str) -> None:
        self._expect_not_detached(what)
        if self._state is not state:
            raise RuntimeError(
                f"{what} needs a controller that is {state.value}, this one is {self._state.value}: {mend}"
            )

    def _expect_not_detached(self, what: str) -> None:
        if self._state is Lifecycle.DETACHED:
            raise RuntimeError(f"{what} on a controller that was detached: call gact_dist.attach(model) for a new one")
