"""Training with offload to a simulated host: bitwise the job without it, however the job goes."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import small_models
import torch
from simulated_device import Simulated, simulate
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gact_dist
from gact_dist import Config

PAIRS = [("L3", "L2"), ("L4bit-swap", "L1"), ("swap", "exact"), ("actnn-L4", "actnn-L3")]
LINKS = {  # bytes a second, and how far the host runs ahead
    "fast": (1e9, 0.0),
    "slow": (2e7, 0.0),
    "fast, host ahead": (1e9, 1.0),
}


@pytest.fixture(params=LINKS)
def device(request, monkeypatch) -> Simulated:
    bandwidth, lead_s = LINKS[request.param]
    device = Simulated(bandwidth, bandwidth, lead_s=lead_s, compute_s=1e-3)
    simulate(monkeypatch, device)
    return device


@pytest.fixture
def fast(monkeypatch) -> Simulated:
    device = Simulated(compute_s=1e-3)
    simulate(monkeypatch, device)
    return device


def attached(model: nn.Module, level: str, **settings) -> gact_dist.Controller:
    offload = {"offload": {"min_bytes": 128, **settings.pop("offload", {})}}
    config = Config.from_level(level, min_numel=16, **{"adapt_interval": 2, **settings}, **offload)
    return gact_dist.attach(model, config=config)


def storage_of(gact: gact_dist.Controller):
    return gact._schedule.hooks._job.offload


def assert_empty(gact: gact_dist.Controller) -> None:
    storage = storage_of(gact)
    storage.statistics()
    assert (storage.device_bytes, storage.pool.used_bytes) == (0, 0)


def train(kind: str, level: str | None, steps: int = 4, **settings) -> tuple[Tensor, Tensor, Tensor]:
    """See small_models.train; level None: without gact_dist."""
    model, batch = getattr(small_models, kind)(**({"dropout": 0.1} if kind == "gpt" else {}))
    gact = attached(model, level, **settings) if level is not None else None
    found = small_models.train(model, batch, gact, steps)
    if gact is not None and gact.config.offload.enabled:
        assert gact.report().host_bytes > 0
        assert_empty(gact)
    return found


@cache
def without_offload(kind: str, level: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """What train() gives at a level that does not offload, trained once: no link of a device plays a part in it."""
    return train(kind, level)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
@pytest.mark.parametrize(("level", "without"), PAIRS)
def test_offload_changes_no_bit_of_a_job(level, without, kind, device):
    expected = without_offload(kind, without)
    assert device.copies == []
    assert_same(train(kind, level), expected)
    assert {copy.stream for copy in device.copies} == {"out", "in"}


@pytest.mark.parametrize("kind", ["gpt", "cnn"])
def test_swap_is_bitwise_the_untouched_job(kind, device):
    assert_same(train(kind, "swap"), without_offload(kind, None))


@pytest.mark.parametrize(
    "offload", [{"prefetch": 0, "max_device_bytes": 1}, {"max_device_bytes": 1}, {"max_host_bytes": 200_000}]
)
def test_no_setting_changes_a_bit(offload, fast):
    assert_same(train("gpt", "L3", offload=offload), without_offload("gpt", "L2"))
    assert fast.peak_host_bytes <= offload.get("max_host_bytes", 2**40)


def test_every_layout_and_type_that_autograd_saves_comes_back(fast):
    def forward(x):
        image = x.view(4, 4, 16, 16).to(memory_format=torch.channels_last)
        parts = x.view(16, 256).split(64, dim=1)  # with gaps
        wave = torch.polar(x.abs() + 1, x).conj()
        expanded = x.view(16, 256, 1).expand(16, 256, 3)
        terms = [
            image.sin(),
            parts[0] * parts[2].t().contiguous().t(),
            wave.exp().abs(),
            expanded.sin(),
            x.double().exp(),
        ]
        return sum(term.sum().float() for term in terms) + x.view(64, 64)[torch.arange(0, 64, 2)].exp().sum()

    x = torch.randn(4096, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(x), x)
    gact = attached(nn.Identity(), "swap")
    for _ in range(3):
        with gact.step():
            loss = forward(x)
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, expected)
    del loss
    assert_empty(gact)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_of_checkpointed_blocks_leave_as_well(reentrant, fast):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    def run(level):
        torch.manual_seed(0)
        model, x = Net(), torch.randn(32, 64, requires_grad=True)
        gact = attached(model, level, adapt_interval=1000)
        for _ in range(3):
            with gact.step():
                loss = model(x).square().sum()
            loss.backward()
        return x.grad, gact.report().host_bytes

    (found, host_bytes), (expected, _) = run("L4bit-swap"), run("L1")
    assert torch.equal(found, expected)
    assert host_bytes > 0


# -- the user's ways ---------------------------------------------------------------------------------------------------


def gpt_step(gact, loss_fn, batch):
    with gact.step():
        return loss_fn(batch)


@pytest.fixture
def gpt(device):
    """(controller at L4bit-swap, loss function, batch, parameters) of a small model, one step already behind it."""
    model, batch = small_models.gpt()
    gact = attached(model, "L4bit-swap")
    loss_fn = small_models.loss_of(model)
    gpt_step(gact, loss_fn, batch).backward()
    return gact, loss_fn, batch, list(model.parameters())


def test_a_graph_can_be_run_back_several_times(gpt):
    gact, loss_fn, batch, parameters = gpt
    loss = gpt_step(gact, loss_fn, batch)
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters, retain_graph=True)
    third = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, third, strict=True))
    del loss
    assert_empty(gact)


def test_a_double_backward_works(fast):
    def penalty(level):
        model, (inputs, targets) = small_models.mlp()
        gact = attached(model, level, adapt_interval=1000)
        results = []
        for _ in range(3):
            with gact.step():
                loss = small_models.loss_of(model)((inputs, targets))
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            norm = sum(gradient.square().sum() for gradient in gradients)
            results += torch.autograd.grad(norm, parameters, allow_unused=True)
        return [result for result in results if result is not None]

    found, expected = penalty("swap"), penalty("exact")
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_several_graphs_in_flight_and_a_sum_of_losses(gpt):
    gact, loss_fn, batch, parameters = gpt

    def gradients(order):
        """One flat gradient a graph, of three graphs that are run back in this order."""
        gact._schedule.step = 1  # the rounding of each turn is that of the last one
        losses = [gpt_step(gact, loss_fn, batch) for _ in range(3)]
        found = {n: torch.cat([g.flatten() for g in torch.autograd.grad(losses[n], parameters)]) for n in order}
        return [found[n] for n in range(3)]

    expected = gradients((0, 1, 2))
    for order in ((2, 1, 0), (1, 2, 0)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(order), expected, strict=True))
    assert_empty(gact)
    gact._schedule.step = 1
    total = torch.autograd.grad(sum(gpt_step(gact, loss_fn, batch) for _ in range(3)), parameters)
    # float32 sums in another order: 1e-5 is a hundred times their rounding
    torch.testing.assert_close(torch.cat([g.flatten() for g in total]), sum(expected), rtol=1e-5, atol=1e-6)
    del total
    assert_empty(gact)


def test_an_exception_in_the_forward_leaves_nothing(gpt):
    gact, loss_fn, batch, _ = gpt

    def failing():
        with gact.step():
            loss_fn(batch)
            raise KeyError("user")

    for _ in range(3):
        with pytest.raises(KeyError):
            failing()
    gc.collect()  # the exception's frames
    assert_empty(gact)
    gpt_step(gact, loss_fn, batch).backward()
    assert_empty(gact)


def test_an_exception_in_the_backward_leaves_nothing(gpt):
    gact, loss_fn, batch, parameters = gpt
    loss = gpt_step(gact, loss_fn, batch)

    def fail(_):
        raise KeyError("user")

    hook = parameters[len(parameters) // 2].register_hook(fail)
    with pytest.raises(KeyError):
        loss.backward()
    hook.remove()
    del loss
    gpt_step(gact, loss_fn, batch).backward()  # torch keeps a graph that failed until the next backward
    assert_empty(gact)


def test_a_skipped_backward_leaves_nothing(gpt):
    gact, loss_fn, batch, _ = gpt
    for number in range(6):
        loss = gpt_step(gact, loss_fn, batch)
        if number % 2:
            loss.backward()
    del loss
    assert_empty(gact)


def test_branches_that_come_and_go(fast):
    def run(level):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        gact = attached(layers, level, adapt_interval=1000)
        x, sums = torch.randn(32, 64, requires_grad=True), []
        for number in range(12):
            with gact.step():
                y = x
                for layer in layers if number % 3 else reversed(layers[: 1 + number % 4]):
                    y = torch.tanh(layer(y))
                loss = y.sum()
            loss.backward()
            sums.append(x.grad.clone())
        return sums

    assert all(torch.equal(a, b) for a, b in zip(run("L4bit-swap"), run("L1"), strict=True))


def test_a_tensor_that_was_modified_in_place_raises_although_it_is_away(fast):
    for level in ("swap", "L4bit-swap"):
        gact = attached(nn.Identity(), level)
        x = torch.randn(64, 64, requires_grad=True)
        with gact.step():
            h = x * 2
            loss = h.exp().sum() + h.sin().sum()
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_comes_back_is_private(fast):
    gact = attached(nn.Identity(), "swap")
    x = torch.randn(64, 64, requires_grad=True)
    with gact.step():
        y = x.exp().sin()
    saved = y.grad_fn._saved_self
    expected = saved.clone()
    saved.zero_()
    fast.run(1.0)
    assert torch.equal(y.grad_fn._saved_self, expected)


def test_a_controller_that_follows_offloads_and_detaches(device):
    model, batch = small_models.gpt()
    loss_fn = small_models.loss_of(model)
    gact = attached(model, "L3").follow()
    for _ in range(5):
        loss_fn(batch).backward()
    assert_empty(gact)
    loss = loss_fn(batch)
    gact.detach()
    assert gact.report().offload.sent_bytes > 0
    assert device.host_bytes > 0
    loss.backward()  # graphs that are alive still run
    del loss
    gc.collect()
    assert device.host_bytes == 0


# -- what the user sees ------------------------------------------------------------------------------------------------


def test_the_report_shows_bytes_on_host_and_device_and_stalls(fast):
    model, batch = small_models.gpt()
    loss_fn = small_models.loss_of(model)
    gact = attached(model, "L4bit-swap")
    for _ in range(3):
        gpt_step(gact, loss_fn, batch).backward()
    report = gact.report()
    assert report.host_bytes == sum(row.host_bytes for row in report.rows) == report.offload.sent_bytes > 0
    assert report.host_bytes + report.device_bytes == report.retained_bytes
    assert any(row.host_bytes == 0 < row.bytes for row in report.rows)  # next to the loss
    assert report.offload.peak_device_bytes < report.retained_bytes
    assert report.offload.allocated_host_bytes == fast.host_bytes
    assert "MiB in host memory" in str(report)
    assert f"stalled {report.offload.stalls} times" in str(report)


def test_retained_bytes_are_those_without_offload(fast):
    found = []
    for level in ("L3", "L2"):
        model, batch = small_models.gpt()
        gact = attached(model, level)
        loss_fn = small_models.loss_of(model)
        with gact.step(loss_fn, batch):
            loss_fn(batch)
        report = gact.report()
        found.append((report.retained_bytes, report.exact_bytes, [row.bits for row in report.rows]))
    assert found[0] == found[1]


def test_without_offload_there_is_nothing_to_report():
    gact = gact_dist.attach(small_models.mlp()[0], level="L1")
    assert gact.report().offload is None
    assert "host memory" not in str(gact.report())


def test_offload_of_what_compiled_graphs_pack_is_refused(fast):
    with pytest.raises(ValueError, match=r"compile_hooks is 'inlined' and offload.enabled is true.* use 'eager'"):
        attached(small_models.mlp()[0], "L3", compile_hooks="inlined")


AT_EXIT = """
import sys
sys.path[:0] = {paths!r}
import small_models, simulated_device, gact_dist
from gact_dist import Config
class Patch:
    setattr = staticmethod(setattr)
simulated_device.simulate(Patch, simulated_device.Simulated(1e6, 1e6, compute_s=1e-3))
model, batch = small_models.gpt()
gact = gact_dist.attach(model, config=Config.from_level("L3", min_numel=16, offload={{"min_bytes": 128}}))
graphs = []
for _ in range(3):
    with gact.step():
        graphs.append(small_models.loss_of(model)(batch))
graphs[0].backward()
print(gact.report().host_bytes > 0)
"""


def test_the_interpreter_ends_with_graphs_alive_and_copies_in_flight():
    tests = Path(__file__).parents[1]
    code = AT_EXIT.format(paths=[str(tests / "support"), str(tests.parent)])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")
