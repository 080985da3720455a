"""Backwards with create_graph=True within a step: what they save is counted, named, compressed and measured."""

import gc
import statistics
import sys
import threading
from contextlib import closing

import pytest
import torch
from create_graph_jobs import JOBS, critic_job, perceptron
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.call_stack import site_in_backward
from gact_dist.hooks.handles import Replaceable
from gact_dist.hooks.sinks import Record
from gact_dist.sensitivity import measure
from gact_dist.sensitivity.inner_backward import InnerBackwards, Reruns, squared_products
from gact_dist.sensitivity.measuring_mode import MeasuringMode

ANY_JOB = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


def attached(model, policy="uniform", **settings):
    return gact_dist.attach(model, config=Config(policy=policy, **{"min_numel": 0, **settings}))


def flat_gradient(model, loss):
    """The last bias of a critic has no gradient from a penalty alone."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    pairs = zip(parameters, found, strict=True)
    return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in pairs])


def names(gact, forward):
    with gact.step():
        forward()
    return [row.name for row in gact.report().rows]


def kept_by_untouched(model, forward):
    """Bytes of the storages that autograd keeps for the backward, those of parameters and arguments left out."""
    storages, others = {}, {parameter.untyped_storage()._cdata: parameter for parameter in model.parameters()}

    def note_arguments(_, given):
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        others.update({tensor.untyped_storage()._cdata: tensor for tensor in tensors})

    arguments = model.register_forward_pre_hook(note_arguments)

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    arguments.remove()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in others)


# -- what is kept ---------------------------------------------------------------------------------------------------


@ANY_JOB
def test_exact_is_bitwise_the_untouched_job_and_keeps_the_same_bytes(job):
    model, batch, loss_fn = job()
    untouched = flat_gradient(model, loss_fn(batch))
    gact = attached(model, policy="exact")
    with gact.step():
        loss = loss_fn(batch)
    assert torch.equal(flat_gradient(model, loss), untouched)
    report = gact.report()
    assert report.exact_bytes == report.retained_bytes == kept_by_untouched(model, lambda: loss_fn(batch)) > 0


@ANY_JOB
def test_rounded_it_keeps_a_fraction_of_the_bytes_that_it_counts(job):
    model, batch, loss_fn = job()
    gact = attached(model, bits=4)
    for _ in range(2):
        with gact.step():
            loss_fn(batch)
    report = gact.report()
    assert report.exact_bytes == kept_by_untouched(model, lambda: loss_fn(batch))
    # 4 bits of 32 and four bytes for 128 elements: 0.133; small tensors and statistics take the rest
    assert report.retained_bytes < 0.25 * report.exact_bytes


def test_what_an_inner_backward_reads_is_stored_once_and_rounded_once():
    x = torch.randn(64, 64, requires_grad=True)
    gact = attached(nn.Identity(), bits=2)
    seen = []

    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h * h * h

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return CubeGradient.apply(grad, seen[-1])

    class CubeGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, grad, h):
            ctx.save_for_backward(h)
            return 3 * grad * h * h

        @staticmethod
        def backward(ctx, weight):
            seen.append(ctx.saved_tensors[0])
            return 3 * weight * seen[-1] * seen[-1], 6 * weight * seen[-1]  # where the gradient is one

    with gact.step():
        cubes = Cube.apply(x * 2).sum()
        (slope,) = torch.autograd.grad(cubes, x, create_graph=True)
        loss = cubes + slope.square().sum()
    assert [row.name for row in gact.report().rows if row.codec == "quantised"] == [":Mul", ":Mul#1"]  # h and the slope
    loss.backward()
    # by the inner backward, and by the outer for each of the two operators
    assert len(seen) == 3
    assert all(torch.equal(h, seen[0]) for h in seen)
    assert not torch.equal(seen[0], 2 * x)


def test_a_relu_that_is_read_twice_keeps_one_mask():
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(128, 16)

    def forward():
        (slope,) = torch.autograd.grad(model(x).sum(), model[0].weight, create_graph=True)
        return slope.square().sum()

    untouched = flat_gradient(model, forward())
    gact = attached(model, bits=8)
    for _ in range(2):
        with gact.step():
            loss = forward()
    assert sum(row.codec == "mask" for row in gact.report().rows) == 1
    assert (flat_gradient(model, loss) - untouched).norm() < 0.02 * untouched.norm()


def test_a_tensor_without_a_graph_is_kept_exactly():
    a, b = torch.randn(64, 64, requires_grad=True), torch.rand(64, 64) + 0.5
    gact = attached(nn.Identity(), bits=2)

    def loss_fn():
        # the gradient of a * a is 1 / b, which has no graph, and is saved by the product with a
        (slope,) = torch.autograd.grad((a * a / b).sum(), a, create_graph=True)
        return slope.square().sum()

    for _ in range(3):
        with gact.step():
            loss_fn()
    (row,) = [row for row in gact.report().rows if "@loss_fn+2" in row.name and row.name.startswith(":Input")]
    assert row.codec == "exact"


# -- names ----------------------------------------------------------------------------------------------------------


@ANY_JOB
def test_names_are_unique_and_independent_of_step_and_batch_size(job):
    model, batch, loss_fn = job()
    gact = attached(model)
    whole = names(gact, lambda: loss_fn(batch))
    part = names(gact, lambda: loss_fn(tuple(tensor[:9] for tensor in batch)))
    assert len(set(whole)) == len(whole)
    assert whole == part == names(gact, lambda: loss_fn(batch))


def test_names_tell_the_call_and_the_module_in_which_it_runs():
    model, batch, loss_fn = JOBS["forces"]()
    inner = nn.Sequential(nn.Identity(), model)
    found = names(attached(inner), lambda: loss_fn(batch))
    assert {"1:Mul@2", "1:Sigmoid@2"} < set(found)  # lines count from that of def forward
    model, batch, loss_fn = JOBS["penalty"]()
    found = names(attached(model), lambda: loss_fn(batch))
    assert {":Mul@gradient_penalty+3", ":Sigmoid@gradient_penalty+3"} < set(found)


def test_a_penalty_that_is_left_out_of_some_steps_shifts_no_other_name():
    model, (real, fake), _ = JOBS["penalty"]()
    gact = attached(model)

    def slope_of(x, target):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(2, dim=1) - target).square().mean()

    def forward(*penalties):
        return model(real).square().mean() + sum(penalty(fake) for penalty in penalties)

    def of_real(x):
        return slope_of(x, 1.0)

    def at_zero(x):
        (slope,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        return slope.square().mean()

    without = names(gact, forward)
    only_one, only_other = (set(names(gact, lambda p=p: forward(p))) for p in (of_real, at_zero))
    inner = {name for name in only_one if "slope_of" in name}
    assert inner
    assert not inner & only_other
    assert {name for name in without if not name.startswith(":")} <= only_one
    assert inner <= set(names(gact, lambda: forward(at_zero, of_real)))


def test_the_call_is_found_from_a_thread_of_the_engine():
    found = []

    def look():
        found.append(site_in_backward(sys._getframe(), main))

    def hook(gradient):
        worker = threading.Thread(target=look)
        worker.start()
        worker.join()
        return gradient

    main = threading.get_ident()
    x = torch.randn(3, requires_grad=True)
    h = x * 2
    h.register_hook(hook)
    for create_graph in (True, False):
        torch.autograd.grad((h * h).sum(), x, create_graph=create_graph, retain_graph=True)
    look()
    assert found[0] is not None
    assert found[0].in_backward
    assert "found_from_a_thread" in found[0].line
    assert found[1:] == [None, None]


# -- what is not packed ---------------------------------------------------------------------------------------------


class Recomputing(torch.autograd.Function):
    """x -> tanh(x), recomputed by a backward that enables grad, as reversible layers do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(x.tanh(), x, grad)[0]


def checkpointed(reentrant):
    return lambda x: checkpoint(lambda y: (y * 2).tanh().exp(), x, use_reentrant=reentrant)


@pytest.mark.parametrize(
    "operator",
    [torch.tanh, Recomputing.apply, checkpointed(True), checkpointed(False)],
    ids=["plain", "recomputing", "reentrant", "non-reentrant"],
)
def test_a_plain_backward_within_a_step_packs_nothing(operator):
    model = nn.Linear(32, 32)
    gact = attached(model)
    with gact.step():
        loss = operator(model(torch.randn(64, 32))).square().mean()
        before = names_now(gact)
        loss.backward()
        assert names_now(gact) == before


def names_now(gact):
    return [row.name for row in gact._schedule.hooks.account.rows]


def test_an_inner_backward_through_a_checkpoint_is_exact_and_compressed():
    torch.manual_seed(0)
    first, block, last = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), nn.Tanh()
    model = nn.Sequential(first, block, last)
    x = torch.randn(32, 16)

    def loss_fn():
        y = x.clone().requires_grad_()
        out = last(checkpoint(block, first(y), use_reentrant=False))
        (slope,) = torch.autograd.grad(out.sum(), y, create_graph=True)
        return slope.square().sum()

    untouched = flat_gradient(model, loss_fn())
    for policy, bits, bound in (("exact", None, 0.0), ("uniform", 8, 0.05)):
        gact = attached(model, policy=policy, bits=bits)
        for _ in range(2):
            with gact.step():
                loss = loss_fn()
        assert (flat_gradient(model, loss) - untouched).norm() <= bound * untouched.norm()
        rows = [row for row in gact.report().rows if "@loss_fn+3" in row.name and ":Input" not in row.name]
        assert {row.codec for row in rows if row.shape == (32, 64)} == {"exact" if bits is None else "quantised"}
        gact.detach()


# -- sensitivity ----------------------------------------------------------------------------------------------------


def squared_error(model, batch, loss_fn, bits, draws):
    """Squared distance of the compressed from the exact gradient, the mean over draws."""
    exact = flat_gradient(model, loss_fn(batch))
    gact = attached(model, bits=bits)
    with gact.step():
        loss_fn(batch)
    found = []
    for _ in range(draws):
        with gact.step():
            loss = loss_fn(batch)
        found.append(float((flat_gradient(model, loss) - exact).square().sum()))
    gact.detach()
    return statistics.fmean(found)


def measured(model, forward, bits=8, seed=1, **options):
    hooks = SavedTensorHooks(model, Config(min_numel=0, bits=bits), 0)
    found = measure(hooks, model, forward, seed=seed, **options)
    hooks.close()
    return found


# As in tests/sensitivity/test_sensitivity.py, and for the same reason. Eight times 16 directions and, of the tensors
# that are rounded in forwards of their own, eight draws leave 4%, and the measured mean of 64 draws 4%. Where an
# activation has a kink, one draw of what is rounded across it has a relative standard deviation of 0.3, so 10% is out
# of reach. The forces are left out: their error is that of 384 targets and is seen in few parameters (0.4 for a draw).
@pytest.mark.parametrize(
    ("job", "bits", "tolerance"),
    [
        *(
            (job, bits, bound)
            for job in JOBS
            if job not in ("leaky_penalty", "forces")
            for bits, bound in ((8, 0.10), (4, 0.25))
        ),
        ("leaky_penalty", 8, 0.25),
        ("leaky_penalty", 4, 0.25),
    ],
)
def test_predicted_variance_of_the_gradient_is_the_measured_one(job, bits, tolerance):
    model, batch, loss_fn = JOBS[job]()
    draws = [measured(model, lambda: loss_fn(batch), bits, 1000 * draw, probes=16) for draw in range(8)]
    predicted = statistics.fmean(sum(float(item.variance[bits - 1]) for item in items) for items in draws)
    assert predicted == pytest.approx(squared_error(model, batch, loss_fn, bits, draws=64), rel=tolerance)


@pytest.mark.parametrize("job", ["penalty", "norm_penalty", "attention_penalty", "maml", "hessian_vector_product"])
def test_the_products_are_those_of_finite_differences(job, monkeypatch):
    model, batch, loss_fn = JOBS[job]()
    model, batch = model.double(), tuple(tensor.double() for tensor in batch)
    hooks = SavedTensorHooks(model, Config(min_numel=0), 0)
    reruns = Reruns(hooks, model, lambda: loss_fn(batch), 1.0)
    with closing(InnerBackwards()) as inner, reruns.recorded(inner, {}) as (loss, records):
        wanted = [record for record in records if record.compressible]
        squares = squared_products(loss, wanted, inner, seed=3, probes=1)
        products = {record.name: square.double() for record, square in squares.items()}
    take, moved = Record.take, {}

    def take_moved(self, captured):
        handle = take(self, captured)
        if captured.name in moved:
            handle.replacement = captured.tensor.detach() + moved[captured.name]
        return handle

    monkeypatch.setattr(Record, "take", take_moved)
    assert len(products) > len(wanted) // 3
    for name, square in products.items():
        # the element to which the gradient's product with the direction responds most
        flat = torch.zeros(square.numel(), dtype=square.dtype)
        flat[square.flatten().argmax()] = 1e-4
        peak = flat.view(square.shape)
        sides = []
        for sign in (1, -1):
            moved[name] = sign * peak
            sides.append(reruns.gradients({}))
        moved.clear()
        generator, slope = torch.Generator().manual_seed(3), 0.0
        for one, other in zip(*sides, strict=True):
            if one is not None:
                direction = torch.randn(one.shape, generator=generator)
                slope += float(((one - other) * direction).sum()) / 2e-4
        assert slope**2 == pytest.approx(float(square.max()), rel=1e-3), name
    hooks.close()


@pytest.mark.parametrize("job", ["penalty", "relu_penalty", "attention_penalty", "maml", "hessian_vector_product"])
def test_each_tensor_agrees_with_rounding_it_alone(job):
    model, batch, loss_fn = JOBS[job]()
    found = {item.name: item for item in measured(model, lambda: loss_fn(batch), probes=32)}
    draws = [measured(model, lambda: loss_fn(batch), seed=draw * 1000, estimator="perturbation") for draw in range(8)]
    alone = {items[0].name: statistics.fmean(float(i.variance[7]) for i in items) for items in zip(*draws, strict=True)}
    assert all(item.by_perturbation for items in draws for item in items)
    assert set(found) == set(alone)
    whole = sum(alone.values())
    names = [name for name in found if not found[name].by_perturbation and alone[name] > 1e-4 * whole]
    ratios = {name: float(found[name].variance[7]) / alone[name] for name in names}
    assert len(ratios) >= 3
    assert statistics.median(ratios.values()) == pytest.approx(1.0, rel=0.15)
    assert all(0.5 < ratio < 2.0 for ratio in ratios.values()), ratios


def test_only_what_the_pass_does_not_reach_is_measured_in_forwards_of_its_own():
    model, batch, loss_fn = JOBS["penalty"]()
    by_perturbation = [item.name for item in measured(model, lambda: loss_fn(batch)) if item.by_perturbation]
    # what no backward reads: the penalty's slope does not depend on the last layer's input
    assert by_perturbation == ["4:Silu@4#2"]


@pytest.mark.parametrize("kind", ["starts from a graph", "opaque"])
def test_what_cannot_be_followed_is_measured_in_forwards_of_its_own(kind):
    model, x = perceptron(nn.SiLU), torch.randn(64, 32)

    class Opaque(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h.tanh()

        @staticmethod
        def backward(ctx, grad):
            with torch.no_grad():
                return grad * (1 - ctx.saved_tensors[0].tanh() ** 2)

    def loss_fn():
        y = x.clone().requires_grad_()
        out = model(y)
        if kind == "opaque":
            (slope,) = torch.autograd.grad(Opaque.apply(out).sum(), y, create_graph=True)
        else:
            (slope,) = torch.autograd.grad(out, y, out.tanh(), create_graph=True)
        return slope.square().sum()

    found = measured(model, loss_fn)
    assert len(found) > 3
    assert all(item.by_perturbation for item in found)


class Stack(nn.Module):
    """Each layer is a block that would be measured alone."""

    def __init__(self, checkpoints):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.last, self.checkpoints = nn.Linear(32, 1), checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.last(x)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_inner_backward_through_blocks_is_measured_with_the_whole_model(checkpoints):
    torch.manual_seed(0)
    model, batch, loss_fn = critic_job(Stack(checkpoints), 32)
    draws = [measured(model, lambda: loss_fn(batch), seed=1000 * draw, probes=4) for draw in range(8)]
    assert all(item.by_perturbation for item in draws[0]) == checkpoints
    predicted = statistics.fmean(sum(float(item.variance[7]) for item in items) for items in draws)
    assert predicted == pytest.approx(squared_error(model, batch, loss_fn, 8, draws=64), rel=0.15)


class Forces(Stack):
    """Energies and, by a backward within the forward, the forces: as models of molecules do."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, force


@pytest.mark.parametrize("way", ["step", "follow"])
def test_a_job_whose_inner_backward_runs_through_blocks_gets_a_plan(way, caplog):
    def loss_of(outputs):
        energy, force = outputs
        return energy.square().mean() + force.square().mean()

    torch.manual_seed(0)
    model = Forces(checkpoints=False)
    gact = attached(model, policy="gact", bits=4, adapt_interval=3)
    if way == "follow":
        gact.follow()
    for _ in range(6):
        batch = torch.randn(64, 32)  # of which eight examples are measured
        if way == "follow":
            loss_of(model(batch)).backward()
        else:
            with gact.step(lambda batch: loss_of(model(batch)), batch):
                loss = loss_of(model(batch))
            loss.backward()
    assert {row.name for row in gact.report().rows if row.sensitivity is not None}
    assert gact.plan
    assert "does not run" not in caplog.text


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 1)
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x):
        return self.last(checkpoint(self.block, self.first(x).tanh(), use_reentrant=False).tanh())


@pytest.mark.parametrize("ends", ["returns", "calls backward"])
@pytest.mark.parametrize("estimator", ["one-pass", "perturbation"])
def test_a_measurement_frees_its_graphs_without_the_collector(ends, estimator):
    torch.manual_seed(0)
    model, batch, loss_fn = critic_job(Checkpointed(), 32)
    assert torch._dynamo  # the first checkpoint of a process imports it, which leaves cycles that hold frames
    gc.collect()
    gc.disable()
    try:
        before = recorded_alive()
        assert measured(
            model, lambda: loss_fn(batch) if ends == "returns" else loss_fn(batch).backward(), estimator=estimator
        )
        assert recorded_alive() == before
    finally:
        gc.enable()


def recorded_alive():
    return sum(type(item) is Replaceable for item in gc.get_objects())


@pytest.mark.parametrize("call", ["grad", "backward", "Tensor.backward"])
def test_the_measuring_mode_notes_an_inner_backward(call):
    w = torch.randn(8, requires_grad=True)
    loss = (w * w).sum()
    for create_graph in (False, True):
        mode = MeasuringMode()
        with mode:
            if call == "grad":
                torch.autograd.grad(loss, w, create_graph=create_graph, retain_graph=True)
            elif call == "backward":
                torch.autograd.backward(loss, create_graph=create_graph, retain_graph=True)
            else:
                loss.backward(create_graph=create_graph, retain_graph=True)
        assert mode.inner_backward is create_graph
        assert (mode.root is loss) == (call == "Tensor.backward" and not create_graph)


def test_a_closure_with_an_inner_backward_is_measured_by_its_last_backward():
    model, batch, loss_fn = JOBS["penalty"]()
    before = [parameter.grad for parameter in model.parameters()]
    returned, called = (
        measured(model, closure) for closure in (lambda: loss_fn(batch), lambda: loss_fn(batch).backward())
    )
    assert returned
    assert [item.name for item in returned] == [item.name for item in called]
    for one, other in zip(returned, called, strict=True):
        assert torch.equal(one.variance, other.variance)
    assert [parameter.grad for parameter in model.parameters()] == before == [None] * len(before)


def test_a_closure_that_ends_in_a_backward_with_a_graph_is_measured():
    model, batch = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(64, 16)
    plain = measured(model, lambda: model(batch).square().mean().backward())
    found = measured(model, lambda: model(batch).square().mean().backward(create_graph=True))
    assert {item.name for item in plain} <= {item.name for item in found}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_job_with_an_inner_backward_trains_with_an_adapted_plan():
    model, batch, loss_fn = JOBS["penalty"]()
    gact = attached(model, policy="gact", bits=4)
    with gact.step(loss_fn, batch):
        loss = loss_fn(batch)
    assert torch.isfinite(flat_gradient(model, loss)).all()
    with gact.step(loss_fn, batch):
        loss_fn(batch)
    planned = {row.name for row in gact.report().rows if row.sensitivity is not None}
    assert any("@gradient_penalty+" in name for name in planned)
