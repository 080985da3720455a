"""Fused attention on a CUDA device: what each backend saves is compressed and has a name, and the gradient is close."""

from __future__ import annotations

import math

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("the backends of attention are those of a CUDA device, and torch finds none", allow_module_level=True)

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_dist
from gact_dist.hooks.boolean_masks import BooleanMasks

SAMPLES, LENGTH, WIDTH, HEADS = 4, 128, 256, 4
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
UNAVAILABLE = ("No available kernel", "No viable backend")


class Attention(nn.Module):
    """[samples, length, width] -> the same. mask: boolean, or None for a causal one."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.mask = mask
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        causal = self.mask is None
        return self.out(F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=causal).transpose(1, 2).flatten(2))


def job() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, 10))
    return model.to("cuda", torch.bfloat16), torch.randn(SAMPLES, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    """[3, width^2]: of the weights that make queries, keys and values."""
    return torch.autograd.grad(loss, model[1].qkv.weight)[0].float().view(3, -1)


@pytest.mark.parametrize("level", ["L1", "L2"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_saves_is_compressed_and_named_and_the_gradient_is_close(backend, level):
    model, batch = job()

    def loss_fn(x: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return model(x).float().square().mean()

    try:
        exact = gradients(model, loss_fn(batch))
    except RuntimeError as error:
        if not any(text in str(error) for text in UNAVAILABLE):
            raise
        pytest.skip(f"torch has no {backend} attention for this device")
    gact = gact_dist.attach(model, level)
    if level == "L2":
        gact.calibrate(loss_fn, batch, samples=SAMPLES)
    noise, draws = torch.zeros(3, device=exact.device), 4
    for draw in range(1 + draws):
        with gact.step():
            loss = loss_fn(batch)
        if draw > 0:  # the first step learns which tensors are what
            noise += (gradients(model, loss) - exact).square().sum(1) / draws
    square = exact.square().sum(1)
    # 4 bits have 15 steps in the range of 128 numbers, which is five standard deviations: 1 to 2% of a tensor's
    # variance, and each gradient is a product of three to five such tensors. Adaptive bits are for the sum of them.
    assert float(noise.sum() / square.sum()) < 0.05
    assert level == "L2" or float((noise / square).max()) < 0.2
    large = [
        row
        for row in gact.report().rows
        if row.name.partition(":")[0] == "1" and math.prod(row.shape) >= SAMPLES * LENGTH * WIDTH
    ]
    assert len(large) >= 4  # queries, keys, values, and the outputs or the probabilities
    stored = [row for row in large if row.codec != "derived"]  # what attention returns is made again
    assert {row.codec for row in stored} == {"quantised"}
    assert len(stored) >= 3
    assert level == "L2" or {row.bits for row in stored} == {4}
    assert level == "L1" or {row.name for row in stored} <= set(gact.plan)
    assert backend == "math" or any(":ScaledDotProductAttention@" in row.name for row in large)
    assert gact.report().ratio > 3  # bfloat16 in 4 bits and 4 bytes for 128 elements: 3.8


def test_what_is_kept_of_a_boolean_mask_is_made_again_from_it(monkeypatch):
    """By a backend that takes masks; without rounding a bit of it, in observed steps and in others."""
    mask = torch.rand(SAMPLES, 1, LENGTH, LENGTH, device="cuda") < 0.7
    found = []
    for makes in (True, False):
        if not makes:
            monkeypatch.setattr(BooleanMasks, "behind", lambda *_: None)
        torch.manual_seed(0)
        model = nn.Sequential(Attention(mask), Attention(mask), nn.Linear(WIDTH, 10)).to("cuda", torch.bfloat16)
        batch = torch.randn(SAMPLES, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
        gact = gact_dist.attach(model, "L1")
        steps = []
        for _ in range(3):
            with gact.step(), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                loss = model(batch).float().square().mean()
            steps.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]))
        rows = gact.report().rows
        found.append((steps, [row.codec for row in rows if row.shape[-2:] == (LENGTH, LENGTH)]))
        gact.detach()
    (made, codecs), (stored, _) = found
    assert sorted(codecs) == ["derived", "derived", "mask"]
    assert all(torch.equal(one, other) for one, other in zip(made, stored, strict=True))
