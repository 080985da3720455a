"""What one operator of a backward reads is decoded as it goes on: same gradients, less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gact_dist
from benchmarks.step.bench_peak import live_peaks
from gact_dist import Config
from gact_dist.hooks import handles, streamed

WIDTH = 64


class Block(nn.Module):
    """A norm, two linear layers and an activation function: the MLP of a transformer."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Gated(nn.Module):
    """The MLP of a Llama, with torch's RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down = nn.RMSNorm(WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Convolutions(nn.Module):
    """A convolution with BatchNorm, and one that reads what relu makes of it; in groups, and with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.norm(self.stem(x))))


def tokens() -> Tensor:
    return torch.randn(16, 24, WIDTH)


def images() -> Tensor:
    return torch.randn(8, 3, 16, 16)


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gelu": (lambda: nn.Sequential(Block(F.gelu), Block(F.gelu)), tokens),
    "silu": (lambda: nn.Sequential(Block(F.silu), Block(F.silu)), tokens),
    "relu": (lambda: nn.Sequential(Block(F.relu), Block(F.relu)), tokens),
    "elu, leaky relu, hardtanh, softplus": (
        lambda: nn.Sequential(Block(F.elu), Block(F.leaky_relu), Block(F.hardtanh), Block(F.softplus)),
        tokens,
    ),
    "gated": (lambda: nn.Sequential(Gated(), Gated()), tokens),
    "convolutions": (Convolutions, images),
    "channels last": (Convolutions, lambda: images().to(memory_format=torch.channels_last)),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stream tensors of any size, in pieces of any size; the operators that got pieces or wrote over their operand."""
    found: list[str] = []

    def noting(function: object, serve: Callable) -> Callable:
        def noted(*args: object, **kwargs: object) -> object:
            result = serve(*args, **kwargs)
            if result is not NotImplemented:
                found.append(str(function).split(".")[1])
            return result

        return noted

    monkeypatch.setattr(handles, "LEAST_NUMEL", 1)
    monkeypatch.setattr(streamed, "_IN_PIECES", dict.fromkeys(streamed._IN_PIECES, streamed._Least(0, 1)))
    serving = {id(function): noting(function, serve) for function, serve in streamed._OPERATORS.items()}
    monkeypatch.setattr(streamed, "_SERVING", serving)
    return found


def gradients(job: str, dtype: torch.dtype = torch.float32, steps: int = 3) -> list[Tensor]:
    """Of a job's last step at level L2, with the same noise in each run."""
    torch.manual_seed(0)
    make, batch = JOBS[job]
    model, x = make().to(dtype), batch().to(dtype)
    gact = gact_dist.attach(model, config=Config.from_level("L2", adapt_interval=100))

    def loss_fn(x: Tensor) -> Tensor:
        return model(x).float().square().mean()

    for _ in range(steps):
        model.zero_grad()
        with gact.step(loss_fn, x):
            loss = loss_fn(x)
        loss.backward()
    gact.detach()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("job", JOBS)
def test_gradients_are_those_of_what_is_decoded_first(
    job: str, dtype: torch.dtype, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gradients(job, dtype)
    assert ("convolution_backward" if JOBS[job][0] is Convolutions else "mm") in served
    monkeypatch.setattr(handles, "LEAST_NUMEL", 2**62)
    served.clear()
    wanted = gradients(job, dtype)
    assert not served
    # a sum in four parts: of rounded terms, so by the type's precision of the largest gradient
    scale = max(float(gradient.float().norm()) for gradient in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert float((one.float() - other.float()).norm()) <= 8 * torch.finfo(dtype).eps * scale


def test_pointwise_operators_write_over_what_they_read(served: list[str]) -> None:
    for job in ("gelu", "silu", "relu", "elu, leaky relu, hardtanh, softplus"):
        gradients(job)
    names = {f"{name}_backward" for name in ("gelu", "silu", "threshold", "elu", "hardtanh", "softplus")}
    assert names <= {*served}


def test_any_operator_reads_and_writes_it_as_a_tensor() -> None:
    whole, weight = torch.randn(384, WIDTH), torch.randn(WIDTH, WIDTH)

    def lazily() -> Tensor:
        return streamed.Streamed.of(
            streamed.Source(whole.shape, whole.stride(), whole.dtype, whole.device, whole.clone)
        )

    assert torch.equal(lazily().t() @ whole, whole.t() @ whole)
    assert torch.equal(lazily() @ weight, whole @ weight)
    assert torch.equal(torch.cat([lazily(), whole]), torch.cat([whole, whole]))
    written = lazily()
    torch.ops.aten.silu_(written)
    assert torch.equal(written + 0, F.silu(whole))


def peak_of_the_last_step(monkeypatch: pytest.MonkeyPatch, least: int) -> int:
    """Bytes of the largest sum of live tensors in a step of two linear layers around gelu, at 4 bits."""
    monkeypatch.setattr(handles, "LEAST_NUMEL", least)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)), torch.randn(8192, 32)
    gact = gact_dist.attach(model, config=Config.from_level("L2", adapt_interval=100))

    def step() -> None:
        with gact.step(lambda x: model(x).square().mean(), x):
            loss = model(x).square().mean()
        loss.backward()
        model.zero_grad()

    for _ in range(12):
        step()
    [peak] = live_peaks(lambda: None, step, 1)
    gact.detach()
    return peak


def test_a_backward_never_holds_all_that_is_decoded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """gelu's backward holds its gradient and its result, where what is decoded was a third tensor of their size."""
    wide_bytes = 8192 * 512 * 4
    decoded_first = peak_of_the_last_step(monkeypatch, 2**62)
    as_it_goes = peak_of_the_last_step(monkeypatch, 1 << 17)
    assert as_it_goes < decoded_first
    assert decoded_first > 3 * wide_bytes
    assert as_it_goes < 2.7 * wide_bytes
