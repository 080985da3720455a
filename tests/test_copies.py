"""Copies of an attached model are plain models; what interrupts a forward leaves no hook behind."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist._torch_internals import innermost_hooks
from gact_dist.hooks import own_hooks

X = torch.randn(32, 64)


class Interruptible(nn.Module):
    """Raises in the middle of its forward when it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.error = nn.Linear(64, 64), nn.Linear(64, 64), None

    def forward(self, x):
        h = self.first(x).tanh()
        if self.error is not None:
            raise self.error
        return self.second(h).square().mean()


class WithSlots(Interruptible):
    __slots__ = ("extra",)


class WithState(Interruptible):
    """Collects its state itself."""

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


def attached(model, level="L2"):
    return gact_dist.attach(model, level=level)


def followed(model):
    gact = gact_dist.attach(model, level="L2").follow()
    model(X).backward()
    model.zero_grad()
    return gact


def installed(model):
    gact = gact_dist.attach(model, level="L1")
    gact.install_hook()
    model(X).backward()
    model.zero_grad()
    return gact


def by_example(model):
    return gact_dist.attach(model, level="actnn-L3")


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


ATTACHED = pytest.mark.parametrize("use", [attached, followed, installed, by_example], ids=lambda use: use.__name__)
COPIED = pytest.mark.parametrize(
    "copied", [copy.deepcopy, pickled, saved, averaged], ids=["deepcopy", "pickle", "save", "EMA"]
)


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    ]


def everything_in(model):
    """All objects of the package that a model leads to."""
    met, pending = {}, [vars(module) for module in model.modules()]
    while pending:
        value = pending.pop()
        if id(value) in met or isinstance(value, (type, torch.Tensor)):
            continue
        met[id(value)] = value
        if isinstance(value, (dict, list, tuple)):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, nn.Module) or type(value).__module__.startswith("gact_dist"):
            pending.append(getattr(value, "__dict__", {}))
    return [value for value in met.values() if type(value).__module__.startswith("gact_dist")]


@COPIED
@ATTACHED
@pytest.mark.parametrize("kind", [Interruptible, WithSlots])
def test_a_copy_is_a_plain_model_and_the_original_stays_attached(kind, use, copied):
    model = kind()
    model.first.register_forward_hook(users_hook)
    gact = use(model)
    made = copied(model)
    gact.detach()
    assert hooks_of(made) == [users_hook]
    assert everything_in(made) == []
    assert isinstance(raw(made), torch.Tensor)
    assert torch.equal(made(X), model(X))


@ATTACHED
def test_a_shallow_copy_has_submodules_in_common_but_is_not_followed(use):
    model = Interruptible()
    gact = use(model)
    made = copy.copy(model)
    gact.detach()
    assert hooks_of(made) == []
    assert "_call_impl" not in vars(made)


def users_hook(*_):
    return None


def raw(model):
    """What autograd keeps of the result of the first layer's tanh."""
    node = model(X).grad_fn.next_functions[0][0]
    while "Tanh" not in node.name():
        node = next(below for below, _ in node.next_functions if below is not None and "Accumulate" not in below.name())
    return node._raw_saved_result.data


@ATTACHED
@COPIED
def test_the_original_goes_on_with_its_own_controller(use, copied):
    model = Interruptible()
    gact = use(model)
    copied(model)
    if use in (attached, by_example):
        with gact.step():
            loss = model(X)
    else:
        loss = model(X)
    loss.backward()
    assert {row.codec for row in gact.report().rows} - {"exact"}
    gact.detach()
    assert hooks_of(model) == []
    assert "_call_impl" not in vars(model)


@pytest.mark.parametrize("kind", [WithState, WithSlots])
def test_a_class_that_collects_its_own_state_is_copied_without_hooks(kind):
    model = kind()
    gact = followed(model)
    made = pickled(model)
    gact.detach()
    assert torch.equal(made(X), model(X))
    assert everything_in(made) == []
    assert not made._forward_hooks
    assert not made._forward_pre_hooks


class Reduced:
    """Behind nn.Module in the order of bases."""

    def __reduce_ex__(self, protocol):
        return Behind, ()


class Behind(Interruptible, Reduced):
    """nn.Module defines no __reduce_ex__, so that of Reduced counts."""


def test_a_base_behind_nn_module_reduces_as_it_does_alone():
    model = Behind()
    gact = followed(model)
    assert model.__reduce_ex__(2) == (Behind, ())
    gact.detach()
    assert model.__reduce_ex__(2) == (Behind, ())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(16, 16)

    def forward(self, x):
        return self.rnn(x)[0].square().mean()


def test_a_model_that_is_saved_whole_is_loaded_as_weights_only(tmp_path):
    """As word_language_model of pytorch/examples does; nn.LSTM collects its state itself."""
    model, x = Recurrent(), torch.randn(8, 4, 16)
    gact = gact_dist.attach(model, level="L2").follow()
    model(x).backward()
    torch.save(model, tmp_path / "model.pt")
    gact.detach()
    with torch.serialization.safe_globals([Recurrent, nn.LSTM]):
        made = torch.load(tmp_path / "model.pt")
    assert torch.equal(made(x), model(x))


def test_a_class_that_reduces_itself_is_saved_without_hooks():
    model = torch.fx.symbolic_trace(Recurrent())
    gact = gact_dist.attach(model, level="L2").follow()
    x = torch.randn(8, 4, 16)
    model(x).backward()
    made = pickled(model)  # recursed without end, through what calls the module
    gact.detach()
    assert torch.equal(made(x), model(x))
    assert not made._forward_hooks


def test_copies_of_a_wrapper_that_collects_its_own_state_run(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Interruptible()
        wrapper = DistributedDataParallel(model)
        gact = gact_dist.attach(wrapper, level="L2").follow()
        wrapper(X).backward()
        for made in (copy.deepcopy(wrapper), pickled(wrapper)):
            assert torch.equal(made(X), model(X))
        assert everything_in(copy.deepcopy(wrapper.module)) == []
        gact.detach()
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_that_holds_its_controller_is_copied_without_it():
    model = Interruptible()
    model.compression = followed(model)
    assert copy.deepcopy(model).compression is None
    assert pickled(model).compression is None
    model.compression.detach()


def test_copies_can_be_dropped_in_any_order():
    # copies of weak references to storages freed them twice
    for _ in range(20):
        model = Interruptible()
        gact = followed(model)
        average = torch.optim.swa_utils.AveragedModel(model)
        average(X).backward()
        gact.detach()
        del average, gact, model
        gc.collect()
        assert all(torch.randn(n).isfinite().all() for n in range(1, 50))


def test_modules_reduce_as_torch_has_it_once_nothing_is_attached(monkeypatch):
    gc.collect()  # controllers that other tests have dropped
    monkeypatch.setattr(own_hooks, "_registered", 0)
    if "__reduce_ex__" in vars(nn.Module):
        monkeypatch.delattr(nn.Module, "__reduce_ex__")
    gacts = [attached(Interruptible()), attached(Interruptible())]
    assert "__reduce_ex__" in vars(nn.Module)
    for gact in gacts:
        gact.detach()
    assert "__reduce_ex__" not in vars(nn.Module)


# -- interrupts -------------------------------------------------------------------------------------------------------

INTERRUPTS = [ValueError("a fault"), KeyboardInterrupt(), SystemExit()]
ANY_INTERRUPT = pytest.mark.parametrize("error", INTERRUPTS, ids=lambda error: type(error).__name__)


@pytest.fixture(autouse=True)
def errors_let_go():
    """An error that was raised holds the frames it passed, and with them the graph of the forward."""
    yield
    for error in INTERRUPTS:
        error.__traceback__ = error.__context__ = error.__cause__ = None


def modes():
    return torch.overrides._get_current_function_mode_stack()


@ANY_INTERRUPT
def test_an_interrupted_forward_leaves_nothing_on_a_followed_model(error):
    model = Interruptible()
    # an error in a measurement counts as an adaptation without a plan: the next one is due at once
    gact = gact_dist.attach(model, config=gact_dist.Config.from_level("L2", adapt_interval=1)).follow()
    for _ in range(3):
        model.error = error
        with pytest.raises(type(error)):
            model(X)
        assert innermost_hooks() is None
        assert modes() == []
        model.error = None
        model(X).backward()
    model(X).backward()
    assert gact.plan
    gact.detach()


@ANY_INTERRUPT
@pytest.mark.parametrize("adapts", [False, True])
def test_an_interrupted_step_leaves_nothing(error, adapts):
    model = Interruptible()
    gact = attached(model)
    model.error = error
    with pytest.raises(type(error)), gact.step(*([model, X] if adapts else [])):
        model(X)
    assert innermost_hooks() is None
    assert modes() == []
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert not {"forward", "_call_impl"} & {name for module in model.modules() for name in vars(module)}
    model.error = None
    with gact.step(model, X):
        loss = model(X)
    loss.backward()
    assert gact.plan
    gact.detach()


@ANY_INTERRUPT
@pytest.mark.parametrize("settings", [{}, {"estimator": "perturbation"}, {"bits": None, "retained_bytes": 60_000}])
@pytest.mark.parametrize("after", range(0, 12, 2))
def test_an_interrupt_at_any_forward_of_a_measurement_leaves_nothing(error, settings, after):
    model = nn.Sequential(Interruptible().first, nn.Tanh(), nn.Linear(64, 1))
    gact = gact_dist.attach(model, config=gact_dist.Config(policy="gact", min_numel=0, **settings))
    untouched = {id(module): set(vars(module)) for module in model.modules()}
    left = iter(range(after))

    def interrupt(*_):
        if next(left, None) is None:
            raise error

    handle = model[1].register_forward_hook(interrupt)

    def measure(times):
        for _ in range(times):
            gact.calibrate(lambda batch: model(batch).square().mean(), X)

    with pytest.raises(type(error)):
        measure(20)
    handle.remove()
    assert innermost_hooks() is None
    assert modes() == []
    assert {id(module): set(vars(module)) for module in model.modules()} == untouched
    measure(1)
    gact.detach()
