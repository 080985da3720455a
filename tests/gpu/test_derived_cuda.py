"""What backward makes again on a CUDA device, where torch has a fused RMS norm."""

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_fused_rms_norm_is_made_again(dtype, weighted):
    torch.manual_seed(0)
    norm = nn.RMSNorm(WIDTH, elementwise_affine=weighted)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH)).cuda().to(dtype)
    x = torch.randn(512, WIDTH, device="cuda", dtype=dtype)

    def gradients() -> Tensor:
        loss = model(x).float().square().mean()
        return torch.cat([grad.flatten().float() for grad in torch.autograd.grad(loss, list(model.parameters()))])

    hooks, exact = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0), gradients()
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)) as footprint:
            gradients()
    assert len(hooks.derived_names) == 1
    stored = dict.fromkeys(name for name in footprint.tensors if name not in hooks.derived_names)
    with hooks.rehearsal(Plan(stored, 4)):
        found = gradients()
    rounding = 1e-5 if dtype is torch.float32 else 2**-7
    assert float((found - exact).norm() / exact.norm()) < rounding


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
