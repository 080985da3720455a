"""Policy actnn on a real GPU: the payload of the CPU, and steps that do not wait for the device."""

import pytest
import small_models
import torch
from codec_tensors import random_tensor, raw

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks.per_example import ranked, squared_ranges

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unit_numel", [100, 256, 3000])
def test_the_payload_is_that_of_the_cpu(dtype, unit_numel):
    counts = (0, 2, 5, 0, 3, 0, 0, 0, 2)
    x = random_tensor(12 * unit_numel, dtype).view(12, unit_numel) * torch.arange(1, 13)[:, None].to(dtype)
    keys = squared_ranges(x.view(-1), 12, 256)
    expected = codec.pack(x, ranked(keys, counts), 7)
    packed = codec.pack(x.cuda(), ranked(keys.cuda(), counts), 7)
    assert torch.equal(packed.payload.cpu(), expected.payload)
    assert torch.equal(raw(codec.unpack(packed).cpu().view(-1)), raw(codec.unpack(expected).view(-1)))


def test_a_step_does_not_wait_for_the_device():
    model, (inputs, targets) = small_models.mlp(width=256)
    batch = inputs.cuda(), targets.cuda()
    loss_fn = small_models.loss_of(model.cuda())
    gact = gact_dist.attach(model, config=Config(policy="actnn", min_numel=64, calibration_samples=64))

    def step(number, *measured):
        with gact.step(*measured, sample_index=torch.arange(64) + 64 * (number % 2)):
            loss = loss_fn(batch)
        loss.backward()

    step(0, loss_fn, batch)
    for number in range(3):
        step(number)
    assert any(isinstance(bits, tuple) for bits in gact.plan.values())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(3):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert "mixed" in {row.codec for row in gact.report().rows}
