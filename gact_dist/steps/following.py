"""follow(): every forward of the model is a step, without a line in the training loop."""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._torch_internals import hooks_are_disabled
from ..distributed import all_ranks, learning_shapes, say
from ..hooks import Calling, Registration, after_forward, before_forward, fixes_rows, on_interrupt
from ..sensitivity import Observation, ProbeBatch
from .schedule import Schedule
from .training_step import TrainingStep, driven_by_a_trainer, has_training_step

_log = logging.getLogger(__name__)
_UNSEEN = "follow() saw no finite gradient at what the forward returns"
_HOW_TO_BE_SEEN = "return tensors, or tuples, mappings or dataclasses of them, or use step(loss_fn, batch)"


class Following:
    """Opens and closes a step around each forward that builds a graph, and observes forwards to adapt with."""

    def __init__(self, schedule: Schedule, before_step: Callable[[], None]) -> None:
        """before_step: called before each forward that would be a step; it may disable the schedule."""
        self._schedule, self._model, self._before_step = schedule, schedule.model, before_step
        self._step = ExitStack()  # what is open around the forward that runs
        self._in_step = False
        self._caller: nn.Module = self._model  # the module whose call is the step
        self._observation: Observation | None = None
        self._candidate: Observation | None = None
        self._has_observed = False  # whether there ever was something to measure with
        self._asked = False  # whether an earlier forward was to be observed, as it was then on every rank
        if isinstance(self._model, torch.jit.RecursiveScriptModule):
            raise TypeError(
                "follow() cannot watch the forward of a ScriptModule, which takes no hooks: use step() around the "
                "forward, or attach to a module that holds it"
            )
        self._training_step: TrainingStep | None = None
        if has_training_step(self._model):
            self._training_step = TrainingStep(self._model, lambda: schedule.measuring)
        self._handles: list[Registration] = []
        self._backward_hooks: list[Any] = []
        if schedule.hooks is not None and schedule.enabled:
            self.resume()

    def resume(self) -> None:
        """Put the hooks on the model."""
        begin, end = Calling(self._begin), Calling(self._end)
        followed: list[nn.Module] = [self._model]
        if self._training_step is not None:
            self._training_step.open()
            followed.append(self._training_step)
        self._handles = [
            handle
            for module in followed
            for handle in (
                before_forward(module, begin, prepend=True, with_kwargs=True),
                after_forward(module, end, with_kwargs=True, always_call=True),
                on_interrupt(module, self._interrupted),
            )
        ]
        self._watch_backward()

    def _interrupted(self) -> None:
        """A forward did not finish, perhaps by Ctrl-C or sys.exit(), after which torch calls no hook."""
        if not self._schedule.measuring and self._schedule.threads.may_enter():
            self._step.close()
            self._in_step, self._candidate = False, None

    def forget(self) -> None:
        """Drop what was observed for an adaptation: the next forward is observed in its place."""
        self._observation, self._asked = None, False

    def close(self) -> None:
        """Take the hooks off the model, until resume()."""
        self._step.close()
        while self._handles:
            self._handles.pop().remove()
        if self._training_step is not None:
            self._training_step.close()
        self._stop_watching_backward()
        self._observation = self._candidate = None

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        schedule = self._schedule
        if self._is_part_of_a_step(module) or not schedule.threads.may_enter():
            return
        self._step.close()  # of a forward that raised before its end
        self._in_step = False
        if not schedule.measuring:
            self._before_step()
        if not schedule.enabled or not torch.is_grad_enabled() or schedule.measuring or learning_shapes():
            return
        if hooks_are_disabled():  # a forward inside a torch.func transform, beside the job's own
            return
        with ExitStack() as step:  # left here only by an error
            if not schedule.threads.enter():
                return
            step.callback(schedule.threads.leave)
            self._begin_step(module, args, kwargs, step)
            self._step = step.pop_all()
        self._in_step = True

    def _begin_step(self, module: nn.Module, args: tuple, kwargs: dict, step: ExitStack) -> None:
        """step: closed when the forward is over."""
        schedule = self._schedule
        if self._caller is not module:
            self._caller, self._observation = module, None
        schedule.next_step()
        if schedule.hooks is not None:
            schedule.hooks.given.begin_step((args, kwargs) if module is self._training_step else None)
        self._stop_watching_backward()
        forward = partial(module, *args, **kwargs)
        self._use_observation(forward)
        if schedule.adapter is not None and not self._has_observed:
            schedule.adapter.idle(schedule.step, _UNSEEN, _HOW_TO_BE_SEEN)
        if schedule.step == 1:
            schedule.start(forward)
            self._verify_first(args, kwargs)
        # this forward replaces one whose backward has not run (two forwards before one backward)
        self._candidate = None
        if schedule.due(in_steps=1) or schedule.drawing_due(in_steps=1):
            # an error bound is measured on whole batches
            wanted = sys.maxsize if schedule.policy.follows_gradient else schedule.config.calibration_samples
            if fixes_rows(self._model, (args, kwargs)):
                wanted = sys.maxsize
            self._asked = True
            self._candidate = Observation((args, kwargs), schedule.probe_examples(wanted))
        step.enter_context(schedule.forward())

    def _is_part_of_a_step(self, module: nn.Module) -> bool:
        """Whether a call is one within training_step, or the one by which DDP comes to it."""
        if self._training_step is None or module is self._training_step:
            return False
        return driven_by_a_trainer(self._model) or (self._in_step and self._caller is self._training_step)

    def _verify_first(self, args: tuple, kwargs: dict) -> None:
        """Before the first step: there is no loss to measure with, but its rounding must not ruin the job."""
        schedule = self._schedule
        if schedule.verifier is not None and schedule.verifier.at is None:
            examples = sys.maxsize if fixes_rows(self._model, (args, kwargs)) else schedule.probe_examples(1)
            loss_fn: Callable[[Observation], Any] = partial(Observation.any_loss, model=self._caller)
            batch = ProbeBatch(loss_fn, Observation((args, kwargs), sys.maxsize), examples, is_guess=True)
            schedule.verify(batch, provisional=True)

    def _end(self, module: nn.Module, args: tuple, kwargs: dict, outputs: Any) -> None:
        if self._schedule.measuring or not self._in_step or module is not self._caller:
            return
        if not self._schedule.threads.may_enter():
            return
        self._in_step = False
        self._step.close()
        self._schedule.watch()
        if self._candidate is not None and self._candidate.outputs(outputs):
            self._observation = self._candidate
        self._candidate = None

    def _watch_backward(self) -> None:
        """Until a forward is seen, look for gradients that the model's parameters get without one."""
        warn = WeakMethod(self._warn_of_unseen_forward)  # the collector does not see what a parameter's hooks hold

        def hook(_: Tensor) -> None:
            method = warn()
            if method is not None:
                method()

        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                self._backward_hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _stop_watching_backward(self) -> None:
        while self._backward_hooks:
            self._backward_hooks.pop().remove()

    def _warn_of_unseen_forward(self) -> None:
        if self._backward_hooks:
            self._stop_watching_backward()
            say(
                _log,
                "parameters of the %s got gradients, but its forward was never called: follow() compresses nothing; "
                "attach to the module whose forward the loop calls, or use step() around the forward",
                type(self._model).__name__,
            )

    def _use_observation(self, whole: Callable[[], Any]) -> None:
        """Draw the gradient of the observed step, or adapt, where either is due and all ranks have one to use.

        whole: runs the forward to come.
        """
        schedule = self._schedule
        if not self._asked or not (schedule.due() or schedule.drawing_due()):
            return
        if not schedule.meet("adapting bits to what was observed"):
            return
        # there is none on a rank whose forward raised
        complete = self._observation is not None and self._observation.complete
        for group in schedule.groups:
            complete = all_ranks(complete, group)
        observation, self._observation = self._observation, None
        if not complete or observation is None:
            self._observation = observation
            return
        self._asked, self._has_observed = False, True
        if schedule.hooks is not None and self._caller is self._training_step:
            schedule.hooks.given.add(observation.inputs)
        unit = observation.squared_gradient if schedule.policy.follows_gradient else None
        loss_fn: Callable[[Observation], Any] = partial(Observation.loss, model=self._caller)
        examples = schedule.probe_examples(schedule.config.calibration_samples)
        batch = ProbeBatch(loss_fn, observation, examples, forward=whole, unit=unit)
        schedule.draw(batch.loss_of_whole, unit)
        if schedule.due():
            schedule.measure(batch)
