"""What backward makes again on a CUDA device, where torch has a fused RMS norm and a fused dropout."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("the fused RMS norm is an operator of CUDA devices, and torch finds none", allow_module_level=True)

from torch import Tensor, nn

from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan

WIDTH = 256


def check_made_again(model: nn.Module, x: Tensor, count: int) -> None:
    """So many tensors are derived, from sources that are stored exactly as they were."""

    def gradients() -> Tensor:
        torch.manual_seed(1)
        loss = model(x).float().square().mean()
        return torch.cat([grad.flatten().float() for grad in torch.autograd.grad(loss, list(model.parameters()))])

    hooks, exact = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0), gradients()
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)) as footprint:
            gradients()
    assert len(hooks.derived_names) == count
    stored = dict.fromkeys(name for name in footprint.tensors if name not in hooks.derived_names)
    with hooks.rehearsal(Plan(stored, 4)):
        found = gradients()
    rounding = 1e-5 if x.dtype is torch.float32 else 2**-7
    assert float((found - exact).norm() / exact.norm()) < rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_fused_rms_norm_is_made_again(dtype, weighted):
    torch.manual_seed(0)
    norm = nn.RMSNorm(WIDTH, elementwise_affine=weighted)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)).cuda().to(dtype)
    check_made_again(model, torch.randn(512, WIDTH, device="cuda", dtype=dtype), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_fused_dropout_leaves_is_made_again(dtype):
    torch.manual_seed(0)
    between = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *between, nn.Linear(WIDTH, WIDTH)).cuda().to(dtype)
    check_made_again(model, torch.randn(512, WIDTH, device="cuda", dtype=dtype), 1)


class EagerAttention(nn.Module):
    """[samples, length, width] -> the same, in separate operators."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.full((x.shape[1], x.shape[1]), -1e9, device=x.device, dtype=x.dtype).triu(1)
        scores = q @ k.transpose(-2, -1) * 0.125 + mask
        probabilities = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.out((nn.functional.dropout(probabilities, 0.2) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probabilities_of_attention_are_made_again(dtype):
    """And those that dropout leaves."""
    torch.manual_seed(0)
    model = EagerAttention().cuda().to(dtype)
    check_made_again(model, torch.randn(4, 128, WIDTH, device="cuda", dtype=dtype), 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_layer_norm_gives_is_made_again_in_one_pass(dtype):
    x = torch.randn(4, 96, WIDTH, device="cuda", dtype=dtype) * 3 + 1
    weight, bias = torch.randn(2, WIDTH, device="cuda", dtype=dtype)
    expected, mean, rstd = torch.native_layer_norm(x, (WIDTH,), weight, bias, 1e-5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = codec.normalised(x, mean, rstd, weight, bias, in_place=False)
        again = codec.normalised(x.clone(), mean, rstd, weight, bias, in_place=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found is not None
    assert torch.equal(found, again)
    # torch contracts products and sums: two roundings to float32 differ, and so may the last bit of the result
    error = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * error, atol=4 * error)
