"""GACT's own way of use (install_hook, iterate, uninstall_hook), the default level, and wrong uses of either way."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import nullcontext, suppress
from typing import ClassVar

import pytest
import torch
from exact_codecs import store_exactly
from small_models import cnn, gpt, gradient, loss_of, mlp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from unseen import Unseen

import gact_dist
from gact_dist import Config, Controller

SMALL = {"min_numel": 16}
ADAPTIVE = Config.from_level("L2", adapt_interval=2, adapt_tolerance=0, watch_interval=0, **SMALL)

UNIFORM = Config.from_level("L1", noise_limit=0)  # a closure runs for iterations alone


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    yield
    gact_dist.set_optimization_level("L2")
    while Loop.installed:  # hooks belong to the thread: left on, they would compress what other tests save
        Loop.installed.pop().uninstall_hook()


class Loop:
    """A training loop written for GACT's controller."""

    installed: ClassVar[list[Controller]] = []

    def __init__(self, controller_options, make=gpt, **options):
        self.model, self.batch = make(**options)
        self.loss_fn = loss_of(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.controller = None if controller_options is None else Controller(self.model, **controller_options)
        self.losses, self.closures = [], 0

    def install(self):
        self.controller.install_hook()
        Loop.installed.append(self.controller)

    def forward_backward(self):
        self.closures += 1
        loss = self.loss_fn(self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.losses.append(float(loss.detach()))

    def closure_is_the_iteration(self, iterations, between=lambda: None):
        """iterate runs the closure; without a controller, the untouched loop."""
        for _ in range(iterations):
            if self.controller is None:
                self.forward_backward()
            else:
                self.controller.iterate(self.forward_backward)
            self.optimizer.step()
            between()
        return self

    def closure_measures_only(self, iterations):
        """The loop runs forward and backward itself, and then hands the closure to iterate."""
        for _ in range(iterations):
            self.forward_backward()
            if self.controller is not None:
                losses = list(self.losses)
                self.controller.iterate(self.forward_backward)
                self.losses = losses  # a measurement is no step of the job
            self.optimizer.step()
        return self

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


USES = ("closure_is_the_iteration", "closure_measures_only")


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("make", [gpt, cnn])
def test_exact_level_trains_bitwise_as_without(use, make):
    options = {"dropout": 0.1} if make is gpt else {}
    untouched = getattr(Loop(None, make, **options), use)(4)
    expected = torch.get_rng_state()
    ours = Loop({"level": "exact"}, make, **options)
    ours.install()
    getattr(ours, use)(4)
    assert torch.equal(torch.get_rng_state(), expected)
    assert ours.losses == untouched.losses
    assert same(ours.weights(), untouched.weights())


@pytest.mark.parametrize("use", USES)
def test_adaptation_leaves_the_loop_bitwise_untouched(use):
    untouched = getattr(Loop(None, cnn), use)(4)
    ours = Loop({"config": ADAPTIVE}, cnn)
    # measure as L2 does, store exactly
    store_exactly(ours.controller)
    ours.install()
    getattr(ours, use)(4)
    assert ours.controller.plan
    assert same(ours.weights(), untouched.weights())


@pytest.mark.parametrize("use", USES)
def test_iterate_adapts_at_the_first_and_every_second_iteration(use):
    loop = Loop({"config": ADAPTIVE})
    loop.install()
    adapted = []
    for _ in range(5):
        before = loop.controller.adaptation
        getattr(loop, use)(1)
        adapted.append(loop.controller.adaptation is not before)
    assert adapted == [True, False, True, False, True]
    # each iteration once, a forward that shows what a step keeps unless the loop's own has, three measurements,
    # and a comparison of each plan with the exact gradient
    shown = 1 if use == "closure_is_the_iteration" else 0
    assert loop.closures == 5 + shown + 3 + 3


@pytest.mark.parametrize("use", USES)
def test_compression_is_on_from_install_to_uninstall(use):
    exact = getattr(Loop(None), use)(1)
    loop = Loop({"config": UNIFORM})
    assert same(loop.weights(), Loop(None).weights())
    loop.install()
    getattr(loop, use)(1)
    assert not torch.equal(gradient(loop.model), gradient(exact.model))
    assert loop.losses == exact.losses  # the forward pass itself is not changed
    loop.controller.uninstall_hook()
    loop.model.load_state_dict(Loop(None).weights())
    loop.forward_backward()
    fresh = Loop(None)
    fresh.forward_backward()
    assert torch.equal(gradient(loop.model), gradient(fresh.model))
    loop.controller.uninstall_hook()  # once more does nothing


def test_rounding_differs_from_iteration_to_iteration():
    loop = Loop({"level": "L1"})
    loop.install()
    gradients = []
    for _ in range(2):
        loop.controller.iterate(loop.forward_backward)
        gradients.append(gradient(loop.model))
    assert not torch.equal(*gradients)


def test_evaluation_between_iterations_does_not_swallow_the_next():
    def evaluate():
        with torch.no_grad():
            loop.model(loop.batch[0])

    loop = Loop({"config": UNIFORM})
    loop.install()
    loop.closure_is_the_iteration(3, between=evaluate)
    assert len(loop.losses) == 3


def test_report_tells_of_the_last_iteration():
    loop = Loop({"config": ADAPTIVE})
    loop.install()
    loop.closure_is_the_iteration(2)
    report = loop.controller.report()
    assert report.rows
    assert report.ratio > 2
    assert any(row.sensitivity is not None for row in report.rows)


@pytest.mark.parametrize("make", [mlp, cnn, gpt])
@pytest.mark.parametrize("fails", [False, True])
def test_a_measurement_frees_its_graph(make, fails):
    """An operator that saves its own result (tanh, relu, the loss's softmax) must not end up owning itself."""
    model, batch = make()
    loss_fn, seen = loss_of(model), Unseen([])

    def measured(part):
        loss = loss_fn(part)
        if fails:
            raise RuntimeError("out of memory, say")
        return loss

    controller = Controller(model, config=ADAPTIVE)
    for module in model.modules():
        module.register_forward_hook(lambda *call: seen.value.append(StorageWeakRef(call[2].untyped_storage())))
    # not pytest.raises, which would keep the frames of the error, and so the graph
    with suppress(RuntimeError) if fails else nullcontext():
        controller.calibrate(measured, batch)
    assert len(seen.value) > 5
    assert all(storage.expired() for storage in seen.value)


def test_hooks_that_cannot_be_installed_leave_the_controller_as_it_was():
    model, batch = mlp()
    loss_fn, controller = loss_of(model), Controller(model, level="L1")

    def installing(x):
        controller.install_hook()
        return x

    with pytest.raises(RuntimeError, match="inside a checkpointed function"):
        checkpoint(installing, torch.randn(3, requires_grad=True), use_reentrant=False)
    with controller.step():
        loss_fn(batch).backward()
    controller.install_hook()
    controller.uninstall_hook()


def test_both_interfaces_follow_one_another():
    loop = Loop({"config": ADAPTIVE})
    loop.install()
    loop.closure_is_the_iteration(1)
    loop.controller.uninstall_hook()
    with loop.controller.step(loop.loss_fn, loop.batch):
        loss = loop.loss_fn(loop.batch)
    loss.backward()
    assert json.loads(loop.controller.state_dict()["gact_dist"])["step"] == 2


# -- the default level ---------------------------------------------------------------------------------------------


def test_default_level_is_l2_and_can_be_set():
    model, _ = mlp()
    assert Controller(model).config == Config.from_level("L2")
    gact_dist.set_optimization_level("L1.2")
    assert gact_dist.attach(model).config == Config.from_level("L1.2")
    assert gact_dist.attach(model, level="L1").config == Config.from_level("L1")
    assert gact_dist.attach(model, adapt_interval=5).config == Config.from_level("L1.2", adapt_interval=5)
    assert gact_dist.attach(model, config=ADAPTIVE).config == ADAPTIVE


def test_levels_are_those_of_gact_and_actnn():
    settings = {level: (values["policy"], values.get("bits")) for level, values in gact_dist.LEVELS.items()}
    assert settings == {
        "L0": ("off", None), "L1": ("uniform", 4), "L1.1": ("uniform", 8), "L1.2": ("uniform", 2),
        "L2": ("gact", 4), "L2.1": ("gact", 3), "L2.2": ("gact", 2), "L3": ("gact", 4),
        "L4bit-swap": ("uniform", 4), "swap": ("exact", None), "exact": ("exact", None),
        "actnn-L0": ("off", None), "actnn-L1": ("uniform", 4), "actnn-L2": ("uniform", 4), "actnn-L3": ("actnn", 2),
        "actnn-L3.1": ("actnn", 2), "actnn-L4": ("actnn", 2), "actnn-L5": ("actnn", 2),
    }  # fmt: skip


def test_level_l0_installs_and_does_nothing():
    untouched = Loop(None).closure_is_the_iteration(2)
    loop = Loop({"level": "L0"})
    loop.install()
    loop.closure_is_the_iteration(2)
    assert same(loop.weights(), untouched.weights())
    assert loop.controller.report().rows == ()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA is what this is about")
@pytest.mark.parametrize("level", ["L3", "L4bit-swap", "swap", "actnn-L4"])
def test_levels_with_offload_say_that_they_need_cuda_and_what_to_use(level):
    with pytest.raises(ValueError, match=rf"no CUDA device, expected one.*for \"{level}\""):
        Controller(mlp()[0], level)


# -- wrong uses ----------------------------------------------------------------------------------------------------


def test_unknown_level_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'L9'.*L0, L1, .*exact"):
        gact_dist.attach(mlp()[0], level="L9")
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        gact_dist.set_optimization_level("exakt")


def test_level_and_config_together_are_refused():
    with pytest.raises(ValueError, match="expected one"):
        gact_dist.attach(mlp()[0], level="L1", config=ADAPTIVE)


def test_config_of_another_type_names_the_way():
    with pytest.raises(TypeError, match="from_dict"):
        gact_dist.attach(mlp()[0], config={"bits": 4})


def test_unknown_setting_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'adapt_interval'"):
        Config.from_dict({"adapt_intervall": 10})


def test_something_else_than_a_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        gact_dist.attach(lambda x: x)


def test_iterate_without_install_hook_says_what_to_call():
    with pytest.raises(RuntimeError, match="call install_hook"):
        Controller(mlp()[0]).iterate(lambda: None)


def test_step_while_hooks_are_installed_says_what_to_call():
    controller = Controller(mlp()[0])
    controller.install_hook()
    with pytest.raises(RuntimeError, match="uninstall_hook"), controller.step():
        pass
    with pytest.raises(RuntimeError, match="installed already"):
        controller.install_hook()
    controller.uninstall_hook()


@pytest.mark.parametrize("call", ["step", "install_hook", "iterate", "calibrate"])
def test_nothing_starts_after_detach(call):
    model, batch = mlp()
    controller = Controller(model)
    controller.detach()
    controller.detach()  # once more does nothing
    uses = {
        "step": lambda: controller.step().__enter__(),
        "install_hook": controller.install_hook,
        "iterate": lambda: controller.iterate(lambda: None),
        "calibrate": lambda: controller.calibrate(loss_of(model), batch),
    }
    with pytest.raises(RuntimeError, match=r"detached: call gact_dist\.attach"):
        uses[call]()


def test_detach_ends_installed_hooks():
    loop = Loop({"level": "L1"})
    loop.install()
    loop.controller.detach()
    loop.forward_backward()
    fresh = Loop(None)
    fresh.forward_backward()
    assert torch.equal(gradient(loop.model), gradient(fresh.model))


@pytest.mark.parametrize("wrong", [lambda batch: None, lambda batch: torch.tensor(1.0)], ids=["nothing", "no graph"])
def test_loss_without_a_graph_is_refused_before_the_step(wrong):
    model, batch = mlp()
    controller = gact_dist.attach(model, config=ADAPTIVE)
    with pytest.raises(ValueError, match="expected a scalar loss"), controller.step(wrong, batch):
        pass


def test_loss_of_several_elements_is_refused():
    model, batch = mlp()
    controller = gact_dist.attach(model, config=ADAPTIVE)
    with pytest.raises(ValueError, match=r"shape \(64, 10\)"):
        controller.calibrate(lambda part: model(part[0]), batch)


def test_closure_without_backward_is_refused():
    loop = Loop({"config": ADAPTIVE})
    loop.install()
    with pytest.raises(ValueError, match="call backward"):
        loop.controller.iterate(lambda: None)


@pytest.mark.parametrize("samples", [0, -1])
def test_calibrating_on_no_samples_is_refused(samples):
    model, batch = mlp()
    with pytest.raises(ValueError, match="expected at least 1"):
        Controller(model).calibrate(loss_of(model), batch, samples=samples)


def test_foreign_state_is_refused():
    with pytest.raises(ValueError, match="pass what state_dict"):
        Controller(mlp()[0]).load_state_dict({"plan": {}})


def test_a_controller_that_is_dropped_while_installed_takes_no_other_hook_off():
    packed = []
    controller = gact_dist.Controller(nn.Linear(4, 4), level="L1")
    controller.install_hook()
    known = weakref.ref(controller._iterations)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        del controller
        gc.collect()
        torch.randn(3, requires_grad=True).exp()
    assert len(packed) == 1
    known().close()
