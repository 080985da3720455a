"""What a profile says of a step: the same with fake tensors as with real ones, and what the job's own report says."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from test_peaks import build
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_dist
from gact_dist._torch_internals import is_fake
from gact_dist.profile import KINDS, LAYOUTS, ProfileError, Settings, profile

LEVELS = ("untouched", "L1", "L1+derive", "L2", "L2.2")


@pytest.fixture(scope="module")
def real():
    return profile(partial(build, "gpt"), LEVELS, Settings(measure=False))  # as with fake tensors


@pytest.fixture(scope="module")
def fake():
    return profile(partial(build, "gpt"), LEVELS, Settings(fake=True))


@pytest.mark.parametrize("level", LEVELS)
def test_fake_tensors_have_the_bytes_of_real_ones(real, fake, level):
    known, found = real.level(level), fake.level(level)
    assert found.peak == known.peak
    assert found.phase_peaks == known.phase_peaks
    assert (found.exact_bytes, found.retained_bytes) == (known.exact_bytes, known.retained_bytes)
    assert found.tensors == known.tensors
    assert fake.fake
    assert not real.fake


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_noise_and_batch_norm_are_the_same_with_fake_tensors(name):
    levels = ("untouched",) if name == "cnn" else ("untouched", "L2")  # its pooling's indices depend on the values
    known, found = (
        profile(partial(build, name), levels, Settings(fake=is_fake, measure=False)) for is_fake in (False, True)
    )
    for level in levels:
        assert found.level(level).peak == known.level(level).peak


class TwoAttentions(nn.Module):
    """In operators, and in one that is not fused, under one mask."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        mask = torch.full((x.shape[1], x.shape[1]), -1e9, device=x.device).triu(1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        one = F.softmax(q @ k.transpose(-2, -1) * 0.25 + mask, -1) @ v
        with sdpa_kernel(SDPBackend.MATH):
            other = F.scaled_dot_product_attention(q, k, v, mask)
        return self.out((one + other).transpose(1, 2).flatten(2))


def test_what_masks_hide_is_known_with_fake_tensors():
    def job():
        model = TwoAttentions()
        return model, torch.randn(4, 64, 64), lambda x: model(x).square().mean()

    known, found = (
        profile(job, ["L1+derive"], Settings(fake=fake, measure=False)).level("L1+derive") for fake in (False, True)
    )
    assert found.tensors == known.tensors
    assert len([row for row in found.tensors if "Softmax" in row.name and row.codec == "derived"]) == 2


def test_levels_that_keep_the_same_without_a_measurement_are_run_once():
    told: list[str] = []
    found = profile(partial(build, "mlp"), ["L1", "L2", "L2+derive"], Settings(fake=True), told.append)
    assert told == ["steps under L1", "steps under L2"]
    assert [level.level for level in found.levels] == ["L1", "L2", "L2+derive"]
    assert found.level("L2+derive").peak == found.level("L2").peak
    told.clear()
    profile(partial(build, "mlp"), ["L1", "L2"], Settings(), told.append)
    assert told == ["steps under L1", "steps under L2"]


def test_every_byte_of_the_peak_has_a_module_an_operator_and_a_line(fake):
    for found in fake.levels:
        assert sum(found.peak.values()) == found.peak_bytes == max(found.phase_peaks.values())
        assert max(moment.total for moment in found.timeline) == found.peak_bytes
        assert set(found.peak) <= set(KINDS)
        for shares in (found.modules, found.operators, found.lines):
            assert sum(share.peak_bytes for share in shares) == found.peak_bytes


def test_activations_are_those_of_the_modules_that_save_them(fake):
    kept = {share.name: share.kept for share in fake.level("untouched").modules}
    widths = [kept[f"blocks.{number}.norm1"]["activations"] for number in range(3)]
    assert min(widths) == max(widths) > 0
    lines = [share.name for share in fake.level("untouched").lines]
    assert any("small_models.py:" in name for name in lines)
    made = {share.name: share.kept for share in fake.level("L2").operators}
    assert made["gact_dist::pack"]["compressed activations"] > 0


def test_what_a_level_keeps_is_what_its_report_says(fake):
    model, batch, loss_fn = build("gpt")
    gact = gact_dist.attach(model, "L1")
    for _ in range(2):
        with gact.step():
            loss = loss_fn(batch)
        loss.backward()
    report, found = gact.report(), fake.level("L1")
    assert (found.exact_bytes, found.retained_bytes) == (report.exact_bytes, report.retained_bytes)
    assert [(tensor.name, tensor.nbytes) for tensor in found.tensors] == [(row.name, row.bytes) for row in report.rows]
    assert found.retained_bytes > fake.level("L2").retained_bytes > fake.level("L2.2").retained_bytes


def test_what_the_untouched_job_keeps_is_known_without_another_level(fake):
    alone = profile(partial(build, "gpt"), ["untouched"], Settings(fake=True)).level("untouched")
    assert (
        alone.exact_bytes
        == alone.retained_bytes
        == sum(share.kept["activations"] for share in alone.modules if share.kept)
    )
    # the hooks also count what is in no storage that the forward made: the batch, which backward reads as well
    assert alone.exact_bytes <= fake.level("L2").exact_bytes <= 1.02 * alone.exact_bytes


def test_exact_tensors_say_why_and_derived_ones_are_named(fake):
    for tensor in fake.level("L2").tensors:
        assert (tensor.codec == "exact") == bool(tensor.why_exact)
    for level in ("L2", "L1+derive"):
        assert any(tensor.codec == "derived" for tensor in fake.level(level).tensors)
    assert all(tensor.codec != "derived" for tensor in fake.level("L1").tensors)


def test_without_a_measurement_levels_have_the_bits_that_one_would_give_them(fake):
    model, batch, loss_fn = build("gpt")
    gact = gact_dist.attach(model, "L2")
    for _ in range(2):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    # a width is a whole number: what is left of a budget is less than a bit of the smallest tensor
    assert fake.level("L2").retained_bytes == pytest.approx(gact.report().retained_bytes, rel=0.02)


class Layer(nn.Module):
    """What ends it is saved in the next one, and could be made of what its own block saves."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        return F.gelu(self.norm(self.linear(x)))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(4)), nn.Linear(64, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chain_of_blocks():
    torch.manual_seed(0)
    model = Layers()
    batch = torch.randn(256, 64), torch.randint(10, (256,))
    return model, batch, lambda batch: F.cross_entropy(model(batch[0]), batch[1])


WAYS = ("measured", "not measured", "fake")


def codecs_of(tensors):
    return {tensor.name: tensor.codec for tensor in tensors if tensor.codec in ("quantised", "derived")}


@pytest.mark.parametrize("level", ["L1+derive", "L2"])
@pytest.mark.parametrize("settings", [Settings(), Settings(measure=False), Settings(fake=True)], ids=WAYS)
def test_what_lies_in_another_block_is_stored_as_the_job_stores_it(settings, level):
    model, batch, loss_fn = chain_of_blocks()
    name, _, setting = level.partition("+")
    options = {setting: True} if setting else {}
    gact = gact_dist.attach(model, config=gact_dist.Config.from_level(name, **options))
    for _ in range(8):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    known, found = gact.report(), profile(chain_of_blocks, (level,), settings).level(level)
    assert codecs_of(found.tensors) == codecs_of(known.rows)
    assert "derived" in codecs_of(known.rows).values()
    of_batch = sum(tensor.nbytes for tensor in batch)  # a profile does not know that the loop holds it
    assert found.retained_bytes == pytest.approx(known.retained_bytes, abs=of_batch)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "zero3"])
def test_what_lies_in_another_block_is_stored_in_a_layout(layout):
    alone, spread = (
        profile(chain_of_blocks, ("L2",), settings).level("L2").tensors
        for settings in (Settings(fake=True), Settings(world_size=2, layout=layout))
    )
    assert codecs_of(spread) == codecs_of(alone)


def test_a_rule_of_a_backward_is_the_reason():
    def job():
        model = nn.Linear(64, 64)
        return model, torch.rand(64, 64), lambda batch: model(batch).abs().sum()

    found = profile(job, ["L2"], Settings(fake=True)).level("L2")
    assert any("sign" in tensor.why_exact for tensor in found.tensors)


def test_untouched_peak_is_that_of_torchs_own_tracker(real):
    model, batch, loss_fn = build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        with tracker:
            loss = loss_fn(batch)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert peak == pytest.approx(real.level("untouched").peak_bytes, rel=0.01)


def test_checkpointing_recomputes(fake):
    found = profile(partial(build, "gpt"), ["untouched"], Settings(fake=True, checkpointing=True)).level("untouched")
    assert found.peak["recomputed activations"] > 0
    assert found.peak_bytes < fake.level("untouched").peak_bytes


@pytest.mark.large
def test_layouts_share_what_they_are_to_share(fake):
    def parts(layout, **changes):
        settings = Settings(layout=layout, world_size=4, **changes)
        return profile(partial(build, "gpt"), ["untouched"], settings).levels[0].peak

    whole = fake.level("untouched").peak
    found = {layout: parts(layout) for layout in LAYOUTS if layout != "tp"}
    for layout in ("fsdp2", "zero2", "zero3"):
        assert found[layout]["parameters"] == pytest.approx(whole["parameters"] / 4, rel=0.05)
    for layout in ("zero1", "fsdp2", "zero2", "zero3"):
        assert found[layout]["optimizer state"] == pytest.approx(whole["optimizer state"] / 4, rel=0.3)
    assert found["ddp"]["sharding"] == whole["parameters"]
    assert found["zero2"]["sharding"] > found["zero3"]["sharding"]
    assert parts("fsdp2", shard_ranks=2)["parameters"] == pytest.approx(whole["parameters"] / 2, rel=0.05)
    assert parts("fsdp2", reshard=2)["sharding"] > found["fsdp2"]["sharding"]


class Split(nn.Module):
    tp_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(F.gelu(self.up(x))).sum()


def test_tensor_parallelism_splits_by_the_plan_of_the_model():
    def job():
        model = Split()
        return model, torch.randn(512, 64), model

    whole = profile(job, ["untouched", "L2"], Settings(fake=True))
    found = profile(job, ["untouched", "L2"], Settings(layout="tp", world_size=4))
    for level in ("untouched", "L2"):
        assert found.level(level).peak["parameters"] < 0.3 * whole.level(level).peak["parameters"]
    assert found.level("L2").retained_bytes < found.level("L2").exact_bytes < whole.level("L2").exact_bytes


def test_a_model_built_elsewhere_becomes_fake():
    made = build("mlp")
    found = profile(lambda: made, ["untouched"], Settings(fake=True)).level("untouched")
    assert found.peak == profile(partial(build, "mlp"), ["untouched"], Settings(fake=True)).level("untouched").peak


def test_a_parameter_in_two_places_stays_one_where_a_real_model_becomes_fake():
    first, last = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
    last.weight = first.weight
    job = nn.Sequential(first, last), torch.randint(0, 512, (8,)), lambda x: last(first(x)).square().mean()
    found = profile(lambda: job, ["untouched"], Settings(fake=True))
    assert found.parameters == 512 * 64
    assert found.level("untouched").peak["parameters"] == 4 * 512 * 64


class DropsByDepth(nn.Module):
    """Its constructor asks for a number that tensors computed, as those of ViT and ConvNeXt do."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(96, 96), nn.Dropout(rate), nn.GELU()) for rate in rates))
        self.scale = nn.Parameter(torch.ones(96))
        self.head = nn.Linear(96, 96)

    def forward(self, x):
        return self.head(self.layers(x) * self.scale).square().mean()


@pytest.mark.parametrize("settings", [{"fake": True}, {"layout": "fsdp2", "world_size": 4}], ids=["fake", "fsdp2"])
def test_a_constructor_that_asks_for_a_value_is_built_with_small_tensors_that_are_real(settings):
    def job():
        model = DropsByDepth()
        assert model.layers[3][1].p == pytest.approx(0.3)
        return model, torch.randn(512, 96), model

    found = profile(job, ["untouched", "L1"], Settings(**settings))
    assert found.parameters == sum(parameter.numel() for parameter in DropsByDepth().parameters())
    if settings == {"fake": True}:
        real = profile(job, ["untouched", "L1"], Settings(measure=False))
        assert found.level("untouched").peak == real.level("untouched").peak
        assert found.level("L1").peak_bytes == pytest.approx(real.level("L1").peak_bytes, rel=0.02)


def test_only_small_tensors_are_real_where_a_constructor_asks_for_a_value():
    kept = []

    def job():
        width = int(torch.full((), 1 << 20).item())
        model = nn.Linear(width, width)  # 4 TiB
        kept.extend(map(is_fake, (model.weight, model.bias, torch.zeros(8), torch.zeros(8).expand(1 << 20, 8).clone())))
        return model, torch.randn(2, width), lambda x: model(x).square().mean()

    found = profile(job, ["untouched"], Settings(fake=True))
    assert kept == [True, True, False, True]
    assert found.parameters == (1 << 40) + (1 << 20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "pipeline"}, "layout is 'pipeline', expected one of ddp"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 2}, "without a layout"),
        ({"optimizer": "adagrad"}, "optimizer is 'adagrad'"),
        ({"reshard": True}, "reshard or shard_ranks was given with layout None"),
        ({"layout": "fsdp2", "world_size": 4, "shard_ranks": 3}, "expected a divisor"),
        ({"layout": "zero1", "optimizer": "none"}, "expected one whose state is shared"),
    ],
)
def test_settings_that_contradict_are_refused(options, message):
    with pytest.raises(ProfileError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    ("settings", "levels", "message"),
    [
        ({}, [], "no level was given"),
        ({}, ["L7"], "level is 'L7'"),
        ({}, ["L3"], "expected one without offload"),
        ({"wrap": ("Block9",)}, ["untouched"], "no module of class 'Block9', expected one of"),
        ({"layout": "tp", "world_size": 2}, ["untouched"], "needs a plan and the model has none"),
    ],
)
def test_what_cannot_be_profiled_is_said(settings, levels, message):
    with pytest.raises(ProfileError, match=message):
        profile(partial(build, "mlp"), levels, Settings(fake=True, **settings))


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (lambda model: lambda batch: model(batch), "a tensor of shape .8, 4. with a graph"),
        (lambda model: lambda batch: 3.0, "the loss is a float"),
        (lambda model: lambda batch: model(batch).sum().detach(), "without a graph"),
    ],
)
def test_a_loss_that_is_no_scalar_with_a_graph_is_refused(job, message):
    def made():
        model = nn.Linear(4, 4)
        return model, torch.randn(8, 4), job(model)

    with pytest.raises(ProfileError, match=message):
        profile(made, ["untouched"], Settings(fake=True))


def test_errors_of_the_model_are_its_own_and_leave_nothing_behind():
    def made():
        model = nn.Linear(4, 4)
        return model, torch.randn(8, 5), lambda batch: model(batch).sum()

    with pytest.raises(RuntimeError, match="same reduction dim"):
        profile(made, ["untouched"], Settings(layout="ddp", world_size=2))
    assert not torch.distributed.is_initialized()
    assert type(torch.zeros(1)) is torch.Tensor


def test_a_rank_of_a_job_is_refused(ranks):
    assert all("process group already" in error for error in ranks(refusal))


def refusal() -> str:
    try:
        profile(partial(build, "mlp"), ["untouched"], Settings(layout="ddp", world_size=2))
    except RuntimeError as error:
        return str(error)
    return ""
