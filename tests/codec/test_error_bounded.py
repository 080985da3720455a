"""AC-GC's error-bounded compressor: the bound holds, the variance is that of one width, zeros cost next to nothing."""

import logging

import pytest
import small_models
import torch
from codec_tensors import random_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gact_dist
from gact_dist import Config, codec
from gact_dist.codec import error_bounded, ops, pack_error_bounded
from gact_dist.codec.error_bounded import group_widths, unit_size

GROUPS, SIZE = 64, 128


def uneven(dtype=torch.float32, spread=2.0):
    """Groups whose ranges differ by 10^spread; every fourth is zero."""
    scale = torch.logspace(-spread / 2, spread / 2, GROUPS)[:, None]
    x = (random_tensor(GROUPS * SIZE, torch.float32).view(GROUPS, SIZE) * scale).to(dtype)
    x[::4] = 0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4, 6])
def test_every_element_keeps_to_the_bound_with_no_more_variance_than_one_width(dtype, bits):
    x = uneven(dtype)
    units, bound = group_widths(x.view(-1), bits, SIZE)
    draws = [codec.unpack(codec.pack(x, units, seed, SIZE)).float() - x.float() for seed in range(20)]
    plain = [codec.unpack(codec.pack(x, bits, seed, SIZE)).float() - x.float() for seed in range(20)]
    rounding = x.float().abs() * torch.finfo(dtype).eps  # of the decoded value to the tensor's own type
    assert all((error.abs() <= bound + rounding).all() for error in draws)
    # both are means over 20 draws of 8192 elements
    assert torch.stack(draws).square().mean() < 1.05 * torch.stack(plain).square().mean()
    assert units.widths.float().mean() < bits - 0.5
    mean = torch.stack(draws).mean(0)
    assert mean.abs().max() < 5.5 * 0.5 * bound / 20**0.5 + rounding.max()


def test_zero_groups_cost_a_byte_and_stay_zero():
    x = torch.zeros(100, 256)
    x[7] = random_tensor(256, torch.float32)
    units, _ = group_widths(x.view(-1), 4, 256)
    assert units.counts[0] == 99
    packed = codec.pack(x, units)
    one = codec.pack(x[7], int(units.widths[7]))
    assert packed.nbytes == 100 + one.nbytes
    assert torch.equal(codec.unpack(packed)[:7], x[:7])
    all_zero, _ = group_widths(torch.zeros(2560), 4, 256)
    assert codec.pack(torch.zeros(2560), all_zero).nbytes == 12


def test_what_is_not_finite_keeps_its_own_group_alone():
    x = uneven()
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    units, bound = group_widths(x.view(-1), 4, SIZE)
    decoded = codec.unpack(codec.pack(x, units, 1, SIZE))
    assert decoded[1, 3] == torch.inf
    assert decoded[1].isfinite().sum() == SIZE - 1
    assert decoded[2].isnan().all()
    rest = [group for group in range(GROUPS) if group not in (1, 2)]
    assert (decoded[rest] - x[rest]).abs().max() <= bound


def test_where_one_width_takes_less_it_is_taken():
    alike = random_tensor(GROUPS * SIZE, torch.float32)
    assert group_widths(alike, 4, SIZE) is None
    assert group_widths(uneven(spread=5.0).view(-1), 8, SIZE) is None  # the widest groups would need more than 8 bits
    assert group_widths(alike[:-1], 4, SIZE) is None
    assert torch.equal(pack_error_bounded(alike, 4, 0, SIZE).payload, codec.pack(alike, 4, 0, SIZE).payload)
    assert codec.pack_error_bounded(uneven(), 4, 0, SIZE).nbytes < codec.pack(uneven(), 4, 0, SIZE).nbytes
    assert unit_size(1024, 256) == 256
    assert unit_size(1024 + 64, 256) == 64
    assert unit_size(1000, 256) is None
    assert pack_error_bounded(alike, 4, 0, SIZE).scheme is codec.Scheme.QUANTISED
    assert pack_error_bounded(uneven().view(-1)[:-24], 4, 0, SIZE).scheme is codec.Scheme.QUANTISED
    assert pack_error_bounded(uneven().t(), 4, 0, SIZE).scheme is codec.Scheme.MIXED


def test_every_instruction_set_stores_the_same_bytes():
    x, before, payloads = uneven(), ops.isa(), []
    units, _ = group_widths(x.view(-1), 3, SIZE)
    for isa in ops.available_isas():
        ops.set_isa(isa)
        payloads.append(codec.pack(x, units, 5, SIZE).payload)
    ops.set_isa(before)
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)


class Sparse(torch.nn.Module):
    """Half of the channels of its activations are zero, as behind channels that died."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.Conv2d(16, 4, 3, padding=1)
        with torch.no_grad():
            self.first.bias[::2] = -100.0

    def forward(self, x):
        return self.second(self.first(x).relu().mul(2.0)).mean((2, 3))


def test_the_report_has_the_bytes_of_both_compressors():
    found = {}
    for compressor in ("fixed-point", "error-bounded"):
        torch.manual_seed(0)
        model, batch = Sparse(), (torch.randn(32, 1, 16, 16), torch.randint(0, 4, (32,)))
        loss_fn = small_models.loss_of(model)
        config = Config(policy="acgc", error=0.1, compressor=compressor, min_numel=64, calibration_samples=32)
        gact = gact_dist.attach(model, config=config)
        for _ in range(7):  # of which six adapt
            with gact.step(loss_fn, batch):
                loss = loss_fn(batch)
            loss.backward()
        found[compressor] = gact.report(), gact.plan, gact.adaptation.gradient_error
    fixed, bounded = found["fixed-point"][0], found["error-bounded"][0]
    assert fixed.fixed_point_bytes == fixed.retained_bytes
    assert found["fixed-point"][1] == found["error-bounded"][1]
    assert bounded.fixed_point_bytes == fixed.retained_bytes
    assert bounded.retained_bytes < 0.85 * fixed.retained_bytes
    assert f"fixed-point: {fixed.retained_bytes / 2**20:.2f} MiB" in str(bounded)
    assert found["error-bounded"][2].measured <= 0.1


def test_settings_that_contradict_each_other_are_errors():
    with pytest.raises(ValueError, match=r"compressor is 'lossy', expected one of fixed-point, error-bounded"):
        Config(compressor="lossy")
    with pytest.raises(ValueError, match=r"'error-bounded' with policy 'gact'.*expected policy 'acgc'"):
        Config(compressor="error-bounded")
    with pytest.raises(ValueError, match="compile_hooks 'inlined', expected"):
        Config(policy="acgc", error=0.1, compressor="error-bounded", compile_hooks="inlined")


def test_on_a_device_that_would_have_to_be_waited_for_one_width_is_kept_and_said_once(caplog):
    error_bounded._warned.clear()
    with caplog.at_level(logging.WARNING, "gact_dist"), FakeTensorMode():
        x = torch.empty(64, 256, device="cuda:0")
        found = [pack_error_bounded(x, 4, 1, 128) for _ in range(2)]
    assert {packed.bits for packed in found} == {4}
    assert [record.getMessage() for record in caplog.records] == [
        "compressor is 'error-bounded' and tensors are on cuda:0: there each keeps one width for all its groups, as "
        "with 'fixed-point', because the host would have to wait for the device to know the size of a payload"
    ]
