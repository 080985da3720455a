"""What is saved as in the step before is recognised by a few looks, and stored as it would be after many."""

import gc
import os
import random
import statistics
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulation import needs_compiler
from torch import nn

import gact_dist
from gact_dist import Config, codec
from gact_dist._short_ways import IS_BUILT
from gact_dist._torch_internals import without_modes
from gact_dist.codec import Packer
from gact_dist.hooks import aliases
from gact_dist.hooks.engine import SavedTensorHooks
from gact_dist.hooks.parameters import Evidence, ParameterRecognition
from gact_dist.hooks.settled import SettledSaves
from gact_dist.hooks.sinks import Again
from gact_dist.hooks.way import Way
from tests.support import block_models, create_graph_jobs, unusual_jobs

STEPS = 7
ROOT = Path(__file__).parents[2]
CONFIGS = {
    "L2": Config.from_level("L2", adapt_interval=4, min_numel=0),
    "one width": Config(policy="uniform", bits=4, min_numel=0),
}


@pytest.fixture
def settled_saves(monkeypatch):
    """Counts what goes the short way."""
    counts = []

    def pack(self, tensor):
        with without_modes():
            hooks, frame = self.long_way.__self__, sys._getframe().f_back
            handle = self.pack_at(tensor, frame)
            counts.append(handle is not None)
            return hooks._pack_within(tensor, frame) if handle is None else handle

    monkeypatch.setattr(SettledSaves, "pack", pack, raising=False)
    return counts


def trained(model, loss_of, settings, steps=STEPS):
    """For each step, (gradient, rows of the report). loss_of(model, step): the loss."""
    gact = gact_dist.attach(model, config=settings)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        with gact.step(lambda _, step=step: loss_of(model, step), ()):
            loss = loss_of(model, step)
        loss.backward()
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        gradient = torch.cat([parameter.grad.to_dense().flatten() for parameter in parameters])
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.01 * parameter.grad
        model.zero_grad()
        found.append((gradient, gact.report().rows))
    gact.detach()
    return found


def check_alike(make, settings, monkeypatch, steps=STEPS):
    """The same with and without a short way. make: () -> (model, loss_of)."""
    short = trained(*make(), settings, steps)
    with monkeypatch.context() as context:
        context.setattr(SettledSaves, "settle", lambda *_: None)
        full = trained(*make(), settings, steps)
    for step, ((gradient, rows), (expected, expected_rows)) in enumerate(zip(short, full, strict=True)):
        assert [row.name for row in rows] == [row.name for row in expected_rows], step
        assert rows == expected_rows, step
        assert torch.equal(gradient, expected), step
    gc.collect()


def of_case(make):
    def made():
        torch.manual_seed(0)
        case = make()
        for _ in range(getattr(case, "warm_up", 0)):
            case[1](case[2])
        return case[0], lambda _, __: case[1](case[2])

    return made


@pytest.mark.parametrize("name", block_models.CASES)
def test_a_model_stores_what_it_would_after_many_looks(name, settled_saves, monkeypatch):
    check_alike(of_case(block_models.CASES[name]), CONFIGS["one width"], monkeypatch, steps=4)
    if name != "random numbers of Python and NumPy":  # each step skips others of its layers
        assert any(settled_saves)


@pytest.mark.parametrize("name", ["gpt with dropout", "unet", "frozen", "llama with labels", "GAT"])
def test_so_it_does_under_plans_that_change(name, settled_saves, monkeypatch):
    check_alike(of_case(block_models.CASES[name]), CONFIGS["L2"], monkeypatch)
    assert any(settled_saves)


@pytest.mark.parametrize("name", unusual_jobs.JOBS)
def test_so_does_an_unusual_job(name, monkeypatch):
    check_alike(of_case(unusual_jobs.JOBS[name]), CONFIGS["one width"], monkeypatch, steps=4)


@pytest.mark.parametrize("name", create_graph_jobs.JOBS)
def test_so_does_a_backward_that_makes_a_graph(name, monkeypatch):
    def made():
        torch.manual_seed(0)
        model, batch, loss_fn = create_graph_jobs.JOBS[name]()
        return model, lambda _, __: loss_fn(batch)

    check_alike(made, CONFIGS["one width"], monkeypatch, steps=4)


class Layers(nn.Module):
    """Layers in an order that may differ from step to step."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x)
        return x


def in_orders(layers, orders, rows=(32,)):
    def made():
        torch.manual_seed(0)
        model = Layers(*layers())
        batches = [torch.randn(rows[step % len(rows)], 64) for step in range(STEPS)]
        return model, lambda model, step: model(batches[step], orders[step % len(orders)]).square().mean()

    return made


def linears_and_activations():
    return nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.ReLU(), nn.GELU()


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2, 5), (0, 5, 2, 1)],
        [(0, 1, 2, 3), (0, 2, 3), (0, 1, 1, 2, 3)],
        [(0, 4, 2, 4), (0, 1, 2, 4), (0, 4, 4, 2)],
        [(0,), (0, 3, 4, 2, 0, 1)],
        [(0, 1, 2), (0, 1, 0)],
    ],
    ids=str,
)
def test_an_order_that_changes_from_step_to_step(orders, settings, monkeypatch):
    check_alike(in_orders(linears_and_activations, orders), settings, monkeypatch, steps=STEPS)


def test_batches_of_several_sizes(monkeypatch, settled_saves):
    """The smaller ones are too small to be rounded."""
    made = in_orders(linears_and_activations, [(0, 1, 2, 4)], rows=(32, 32, 16))
    check_alike(made, Config(policy="uniform", bits=4, min_numel=1500), monkeypatch)
    assert any(settled_saves)


class Gated(torch.autograd.Function):
    """Saves what it was given and what it made of both, which have to fit together: all of it is kept exactly."""

    @staticmethod
    def forward(ctx, x, gate):
        made = torch.tanh(x) * gate
        ctx.save_for_backward(x, gate, made)
        return 2 * made

    @staticmethod
    def backward(ctx, grad):
        x, gate, made = ctx.saved_tensors
        return 2 * grad * (gate - made * torch.tanh(x)), 2 * grad * torch.tanh(x)


class OwnOrNot(nn.Module):
    """The same line calls a function of torch, or one of the user's, from step to step."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x, functions):
        for function in functions:
            x = torch.nn.functional.gelu(function(self.first(x), self.gate(x)))
        return self.last(x)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_what_a_custom_function_saves_at_the_line_of_an_operator(settings, monkeypatch, settled_saves):
    """Where Function.apply has no frame, the frames of both are the same. Four steps know the operator alone."""
    own, not_own = (Gated.apply, torch.mul), (torch.mul, torch.mul)
    orders = [not_own] * 4 + [own, not_own, own]

    def made():
        torch.manual_seed(0)
        model, batch = OwnOrNot(), torch.randn(32, 64)
        return model, lambda model, step: model(batch, orders[step]).square().mean()

    check_alike(made, settings, monkeypatch, steps=STEPS)
    assert any(settled_saves)


class Changing(nn.Module):
    """At one place, in turn: an activation and a parameter; with noise and with ones; in place and not."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last, self.how = nn.Linear(64, 64), nn.Linear(64, 64), how
        self.weight = nn.Parameter(torch.randn(32, 64))
        self.register_buffer("table", torch.rand(32, 64))

    def forward(self, x, step):
        return self.how(self, self.first(x), step)


def noise_or_others(model, x, step):
    noise = torch.rand(32, 64) if step % 2 else (torch.rand(32, 64) > 0.5).float() * 2
    return model.last(x * noise)


def activation_or_frozen(model, x, step):
    return model.last(x * (model.weight if step % 2 else model.weight.detach()))


def scaled_by_noise_or_buffer(model, x, step):
    factor = torch.rand(32, 64) if step % 2 else model.table
    return x * (model.weight * factor)  # made from parameters and buffers alone, or not


def kept_or_given(model, x, step):
    factor = x.detach() if step % 2 else model.weight.detach().clone()
    return model.last(x) * factor


def activation_or_parameter(model, x, step):
    return model.last(x) * ((x if step % 2 else model.weight) * 2)


def made_or_buffer(model, x, step):
    return model.last(x) * (torch.rand(32, 64) if step % 2 else model.table)


def in_place_or_not(model, x, step):
    return model.last(x.relu_() if step % 2 else x.relu()) * x


def saved_before(model, x, step):
    return model.last(x) + (x.tanh().sum() if step % 2 else 0) + x.sin().sum() * 1e-3


def on_another_line(model, x, step):
    if step % 2:
        return model.last(x.sin())
    return model.last(x.sin() * 3)


def by_another_operator(model, x, step):
    return model.last((x.tanh() if step % 2 else x.sigmoid()) * 2)


def a_view_or_not(model, x, step):
    return model.last(x.view(32, 64) if step % 2 else x.t().contiguous().t())


def a_part(model, x, step):
    return model.last((x if step % 2 else torch.cat((x, x))[:32]).sin())


def without_gradient(model, x, step):
    return model.last(x.detach() if step % 2 else x)


def of_another_type(model, x, step):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(step % 2)):
        return model.last(F.gelu(x)).float()


def derived_or_not(model, x, step):
    stored = model.last(x.sin())
    activated, projected = F.gelu(stored), model.last(stored)
    return model.last(x + (activated if step // 2 % 2 else projected))


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "how",
    [
        noise_or_others, made_or_buffer, activation_or_parameter, activation_or_frozen, kept_or_given, in_place_or_not,
        saved_before, on_another_line, by_another_operator, a_view_or_not, a_part, without_gradient, of_another_type,
        derived_or_not, scaled_by_noise_or_buffer,
    ],
)  # fmt: skip
def test_a_place_where_things_change(how, settings, monkeypatch):
    def made():
        torch.manual_seed(0)
        batches = [torch.randn(32, 64) for _ in range(STEPS)]
        return Changing(how), lambda model, step: model(batches[step], step).square().mean()

    check_alike(made, settings, monkeypatch)


def test_an_argument_at_the_place_of_an_activation(monkeypatch):
    """A tensor of the batch is neither stored nor counted, whatever was saved there before."""

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x, other, uses_other):
            return self.layer(x) * (other if uses_other else torch.ones(32, 64))

    def made():
        torch.manual_seed(0)
        batches = [(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(STEPS)]
        return Adds(), lambda model, step: model(*batches[step], step % 2).square().mean()

    check_alike(made, CONFIGS["one width"], monkeypatch)


def test_a_new_plan_and_a_loaded_state_are_obeyed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=0))

    def rows():
        with gact.step():
            loss = model(x).square().mean()
        loss.backward()
        return {row.name: row.bits for row in gact.report().rows if row.codec == "quantised"}

    before = [rows() for _ in range(4)][-1]
    assert set(before.values()) == {4.0}
    state = gact.state_dict()
    gact.load_state_dict(state)
    assert [rows() for _ in range(3)][-1] == before
    gact.detach()
    again = gact_dist.attach(model, config=Config(policy="uniform", bits=2, min_numel=0))
    with again.step():
        loss = model(x).square().mean()
    loss.backward()
    assert {row.bits for row in again.report().rows if row.codec == "quantised"} <= {2.0}
    again.detach()


def test_what_is_settled_keeps_no_tensor_alive():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=0))
    for _ in range(4):
        x = torch.randn(32, 64, requires_grad=True)
        with gact.step():
            hidden = model(x)
            loss = hidden.square().mean()
        loss.backward()
    watched = [ref(x), ref(hidden), ref(loss)]
    del x, hidden, loss
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3
    gact.detach()


def job_of_layers():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    )
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=0))
    x = torch.randn(32, 64)

    def step():
        with gact.step():
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()

    return step, gact


def test_the_short_way_leaves_no_object_behind():
    step, gact = job_of_layers()
    counts = []
    for _ in range(8):
        for _ in range(20):
            step()
        gc.collect()
        counts.append((len(gc.get_objects()), sys.getallocatedblocks()))
    objects, blocks = zip(*counts, strict=True)
    # whatever else runs in this process may leave some in between; what steps leave is in every difference
    assert statistics.median(after - before for before, after in zip(objects, objects[2:], strict=False)) == 0
    assert min(after - before for before, after in pairwise(blocks)) < 20  # one for each step would be 20 every time
    gact.detach()


@contextmanager
def in_two_modes():
    with torch.device("cpu"), torch.device("cpu"):
        yield


@pytest.mark.parametrize("context", [nullcontext, lambda: torch.device("cpu"), in_two_modes])
def test_within_function_modes_things_settle(context, monkeypatch):
    """The inner one is left while an operator runs, the outer one is not."""
    step, gact = job_of_layers()
    long_ways = []
    within = SavedTensorHooks._pack_within
    monkeypatch.setattr(SavedTensorHooks, "_pack_within", lambda *args: long_ways.append(args) or within(*args))
    with context():
        for _ in range(4):
            step()
        assert len(long_ways) > 10
        long_ways.clear()
        step()
    assert (len(long_ways) == 1) is IS_BUILT  # the batch is looked at every time
    gact.detach()


@needs_compiler
def test_dropouts_noise_shows_what_is_no_parameter(monkeypatch):
    """What is computed from it is known by a look at what the product saved, not by one at all behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64))
    gact = gact_dist.attach(model, config=CONFIGS["one width"])
    looks = []
    look = ParameterRecognition.is_parameter

    def noted(self, tensor, module):
        looks.append(tensor.shape)
        return look(self, tensor, module)

    monkeypatch.setattr(ParameterRecognition, "is_parameter", noted)
    for _ in range(5):
        looks.clear()
        with gact.step():
            loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
    assert not looks
    gact.detach()


@needs_compiler
def test_storages_are_pinned_while_a_forward_runs():
    """An address stands for one storage until then, and for none afterwards."""
    step, gact = job_of_layers()
    pins = []

    def count(*_):
        pins.append(sum(type(found).__name__ == "Pin" for found in gc.get_objects()))

    for _ in range(4):
        step()
    count()
    handle = torch.nn.modules.module.register_module_forward_hook(count)
    step()
    handle.remove()
    count()
    assert (pins[0], pins[-1]) == (0, 0)
    assert max(pins) >= 3
    gact.detach()


def test_what_the_short_way_takes_by_its_number_has_that_number():
    """csrc/hooks reads these tuples by position."""
    assert Again._fields == ("name", "packer", "row", "storage_bytes", "way", "after_alias", "name_hash")
    assert (Evidence._fields, Way._fields) == (
        ("way", "by_type", "slot", "edge"),
        ("steps", "last", "blanks"),
    )
    assert aliases._FEW >= 8


SCRIPT = """
import sys
if sys.argv[1] == "long":
    sys.modules["gact_dist._hooks"] = None
import torch
import gact_dist
from gact_dist._short_ways import IS_BUILT
from tests.support import block_models
torch.manual_seed(0)
case = block_models.CASES["gpt with dropout"]()
gact = gact_dist.attach(case[0], config=gact_dist.Config.from_level("L2", adapt_interval=3, min_numel=0))
for _ in range(6):
    with gact.step(case[1], case[2]):
        loss = case[1](case[2])
    loss.backward()
gradients = [parameter.grad for parameter in case[0].parameters()]
print(IS_BUILT, len(gact.report().rows), sum(gradient.double().square().sum().item() for gradient in gradients).hex())
"""


def test_without_the_native_hooks_everything_goes_the_long_way_to_the_same_place():
    found = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))}
    for way in ("short", "long"):
        command = [sys.executable, "-c", SCRIPT, way]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found.append(run.stdout.split())
    assert found[1][0] == "False"
    assert found[0][1:] == found[1][1:]


def test_an_error_on_the_short_way_reaches_the_job(monkeypatch):
    step, gact = job_of_layers()
    for _ in range(4):
        step()

    def fail(*_, **__):
        raise MemoryError("no memory for the payload")

    packers = [packer for packer in gc.get_objects() if type(packer) is Packer and (not IS_BUILT or packer.empty)]
    assert packers
    if IS_BUILT:
        for packer in packers:
            packer.empty = fail
    else:
        monkeypatch.setattr(codec, "pack", fail)
    with pytest.raises(MemoryError, match="no memory for the payload"):
        step()
    monkeypatch.undo()
    for packer in packers if IS_BUILT else ():
        packer.empty = torch.empty
    step()
    gact.detach()


class Noisy(nn.Module):
    """Dropout, whose noise takes one bit, a mask of booleans, and a relu."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.p = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8), 0.5

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        hidden = torch.nn.functional.dropout(hidden, self.p)
        return self.third(self.second(torch.where(hidden > 0.1, hidden, 0.1 * hidden)).relu())


def noisy_job(level="L1"):
    torch.manual_seed(0)
    model, batch = Noisy(), torch.randn(16, 32)
    gact = gact_dist.attach(model, config=Config.from_level(level, min_numel=16))

    def step():
        with gact.step():
            loss = model(batch).square().mean()
        loss.backward()
        return gact.report()

    return step, gact, model


@needs_compiler
def test_masks_settle(monkeypatch):
    step, gact, _ = noisy_job()
    for _ in range(4):
        before = step()
    stored = []
    store = SavedTensorHooks._store_settled
    monkeypatch.setattr(SavedTensorHooks, "_store_settled", lambda *args: stored.append(args) or store(*args))
    after = step()
    assert not stored
    assert {"binary", "mask"} <= {row.codec for row in after.rows}
    assert [(row.name, row.codec, row.bytes) for row in after.rows] == [
        (row.name, row.codec, row.bytes) for row in before.rows
    ]
    assert after.exact_bytes == before.exact_bytes
    gact.detach()


def test_what_is_no_longer_of_two_values_is_stored_exactly(monkeypatch):
    exact, with_exact, _ = noisy_job("exact")
    rounded, with_bits, model = noisy_job()
    for number in range(7):
        if number == 5:  # as pack_binary() does with other values than zero and one more
            monkeypatch.setattr(codec, "pack_binary", lambda tensor: codec.pack(tensor, None))
        found = []
        for step in (exact, rounded):
            torch.manual_seed(number)
            rows = {row.codec for row in step().rows if tuple(row.shape) == (16, 64) and row.dtype == torch.float32}
            found.append(rows)
        monkeypatch.undo()
        assert found[0] == {"exact"}
        assert found[1] == {"exact" if number == 5 else "binary", "mask", "quantised"}
    for gact in (with_exact, with_bits):
        gact.detach()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
