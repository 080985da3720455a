"""Policy actnn: bits for each sample, on any operator."""

import copy
import json
import math
from functools import partial

import numpy as np
import pytest
import small_models
import torch
from gradients import flat_gradient, variance_of_gradient
from torch import Tensor, nn

import gact_dist
from examples.train.config import load_config
from examples.train.models import ResNet
from gact_dist import Config, codec
from gact_dist.policies import Plan, bits_from_state, policy_of
from gact_dist.policies.actnn import COLUMNS, QUANTILES, ExampleCosts, counts_of, statistics
from gact_dist.policies.base import Costs
from gact_dist.policies.plan import one_width

SETTINGS = {"min_numel": 64, "calibration_samples": 64, "adapt_tolerance": 0.0}


# -- the plan ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(8, 4, 3, 2, 2, 1, 1, 1), (2, 2, 2, 2, 1, 1, 1, 1), (8,) * 8])
def test_units_get_their_shares_and_never_more_bits(widths):
    assert counts_of(widths, 16) == tuple(2 * widths.count(bits) for bits in range(9))
    for units in range(1, 40):
        counts = counts_of(widths, units)
        stored = sum(bits * count for bits, count in enumerate(counts))
        assert sum(counts) == units
        assert counts[0] == 0
        assert math.floor(sum(widths) * units / 8) == stored  # all that whole bits can use


def costs_of(names, variance, sizes, samples):
    count = len(names)
    exact_bits, metadata_bits = np.full(count, 32.0), np.zeros(count)
    return Costs(tuple(names), np.array(variance), np.array(sizes), exact_bits, metadata_bits, examples=samples)


def test_costs_are_split_by_the_shares_of_the_quantiles():
    keys = np.arange(16.0)
    row = statistics(keys, keys, 4.0)
    by_key = np.array([(31 - 4 * part - 2) / 120 for part in range(QUANTILES)])
    assert row[:QUANTILES] == pytest.approx(by_key)
    curves = np.outer([1.0, 3.0], (2.0 ** np.arange(1, 9) - 1) ** -2)
    table = np.stack([row, np.zeros(COLUMNS)])
    split = ExampleCosts.build(costs_of(["a", "b"], curves, [80.0, 40.0], table))
    assert split.split == (1.0, 1.0)
    assert len(split.costs.names) == 9
    assert split.costs.variance[:8, 1] == pytest.approx(curves[0, 1] * by_key)
    assert split.costs.sizes.tolist() == [10.0] * 8 + [40.0]
    plan = {"a": (8, 4, 4, 2, 2, 2, 1, 1), "b": None}
    assert split.folded(split.expanded(plan)) == plan
    assert split.folded(split.expanded({"a": 3, "b": 2})) == {"a": 3, "b": 2}
    assert split.expanded({"b": (2,) * 8}) == {}  # it has no shares now, and "a" is unknown
    exact = {name: None if name == split.rows["a"][0] else 2 for name in split.costs.names}
    assert split.folded(exact)["a"] == (8, 2, 2, 2, 2, 2, 2, 2)


KEYS = 1.3 ** np.arange(16)  # at 5 bits widths from 1 to 8 can follow, and 2^b - 1 is nearly 2^b


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        (KEYS, (1.0, 1.0)),
        (KEYS**0.5, (0.5, 1.0)),
        (KEYS**0.25, (0.25, 1.0)),
        (np.ones(16), (1.0, 0.0)),
        (KEYS[::-1], (1.0, 0.0)),
        (None, (1.0, 1.0)),  # nothing was measured: as ActNN does
    ],
)
def test_keys_count_for_as_much_as_they_explain(variance, expected):
    costs = costs_of(["a"], np.ones((1, 8)), [80.0], statistics(KEYS, variance, 5.0)[None])
    split = ExampleCosts.build(costs)
    assert split.split == expected
    assert split.costs.variance.sum(axis=0) == pytest.approx(1.0)
    if expected[1] == 0.0:
        assert split.costs.variance[:, 0] == pytest.approx(1 / QUANTILES)


def test_the_cost_of_a_split_is_that_of_its_widths():
    # two samples of which one has 64 times the variance: 3 bits more, at 3 on average 4.5 and 1.5
    row = statistics([64.0, 1.0], [64.0, 1.0], 3.0)
    expected = (np.array([64, 1]) / 65 / (2.0 ** np.array([4.5, 1.5]) - 1) ** 2).sum() * 49
    assert row[4 * QUANTILES :][:2] == pytest.approx([1.0, expected], rel=1e-4)


@pytest.mark.parametrize("keys", [[0.0] * 6, [math.nan, 1.0, 2.0], [math.inf, 1.0]])
def test_keys_that_say_nothing_make_equal_shares(keys):
    row = statistics(keys, None, 2.0)
    assert row == pytest.approx([1 / QUANTILES] * (4 * QUANTILES) + [0.0] * (COLUMNS - 4 * QUANTILES))


def test_a_plan_goes_through_json_and_to_other_policies():
    plan = Plan({"a": (4, 3, 2, 2, 2, 2, 1, 1), "b": 2, "c": None}, 2)
    written = json.loads(json.dumps(plan.bits))
    read = Plan({name: bits_from_state(name, bits) for name, bits in written.items()}, 2)
    assert read == plan
    assert policy_of(Config(policy="actnn")).restored_plan(read) == plan
    assert policy_of(Config()).restored_plan(read) == Plan({"a": 2, "b": 2, "c": None}, 2)


# -- fewer errors in the same bytes --------------------------------------------------------------------------------


def unequal(seed: int = 0, batch: int = 64) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """An MLP and a batch whose samples differ a hundredfold in size."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    size = torch.logspace(-1, 1, batch)[torch.randperm(batch)]
    return model, (torch.randn(batch, 256) * size[:, None], torch.randint(0, 10, (batch,)))


def measured(build, policy, bits, draws, index=None):
    """(variance of the gradient, bytes kept, controller) with a plan from all of the batch."""
    model, batch = build()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(policy=policy, bits=bits, **SETTINGS))
    if index is not None:
        with gact.step(sample_index=index):
            loss = loss_fn(batch)
        loss.backward()
        model.zero_grad()
    with gact.step(loss_fn, batch, sample_index=index):
        loss_fn(batch)
    variance = 0.0
    exact = flat_gradient(model, loss_fn(batch))
    for _ in range(draws):
        with gact.step(sample_index=index):
            loss = loss_fn(batch)
        variance += float((flat_gradient(model, loss) - exact).square().sum()) / draws
    return variance, gact.report().retained_bytes, gact


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_samples_that_differ_get_bits_that_differ_and_the_gradient_gains(bits):
    expected, budget, _ = measured(unequal, "gact", bits, draws=12)
    variance, kept, gact = measured(unequal, "actnn", bits, draws=12)
    assert kept <= 1.02 * budget  # a byte for each sample of each tensor
    assert variance < 0.4 * expected  # a quarter and less was seen
    assert any(isinstance(widths, tuple) and widths[0] >= widths[-1] + 2 for widths in gact.plan.values())


@pytest.mark.parametrize("kind", ["mlp", "cnn", "gpt"])
def test_samples_that_are_alike_lose_nothing(kind):
    build = partial(getattr(small_models, kind), **({"width": 256} if kind == "mlp" else {}))
    expected, budget, _ = measured(build, "gact", 3, draws=24)
    variance, kept, _ = measured(build, "actnn", 3, draws=24)
    assert kept <= 1.02 * budget
    # both means of 24 draws have a relative standard deviation of a few percent
    assert variance < 1.1 * expected


def confident(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A classifier that is sure of most samples of its batch: their gradients are small, their values are not."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    inputs, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[:48]), labels[:48]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, (inputs, labels)


def test_the_size_of_a_samples_gradient_is_learnt_with_its_number():
    index = 1000 + torch.randperm(64, generator=torch.Generator().manual_seed(3))
    expected, budget, _ = measured(confident, "actnn", 2, draws=12)
    variance, kept, gact = measured(confident, "actnn", 2, draws=12, index=index)
    assert kept <= 1.02 * budget
    assert variance < 0.5 * expected
    sizes = gact._schedule.hooks.encoder.examples.gradients.sizes[index]
    model, (inputs, labels) = confident()
    output = model(inputs)
    gradient = torch.autograd.grad(nn.functional.cross_entropy(output, labels), output)[0]
    # of the last step, whose own rounding does not reach the outputs
    assert torch.allclose(sizes, gradient.square().sum(1), rtol=1e-4)
    assert sizes[:48].max() < sizes[48:].min()


def test_a_sample_that_was_not_seen_counts_as_an_average_one():
    model, batch = small_models.mlp(batch=8)
    gact = gact_dist.attach(model, config=Config(policy="actnn", **SETTINGS))
    gradients = gact._schedule.hooks.encoder.examples.gradients
    assert gradients.of(torch.arange(8)) is None
    with gact.step(sample_index=[5, 3, 0, 1, 2, 4, 6, 7]):
        loss = small_models.loss_of(model)(batch)
    loss.backward()
    assert gact._schedule.hooks.encoder.examples._sizes is None  # another batch may be measured with now
    known = gradients.of(torch.arange(8))
    found = gradients.of(torch.tensor([3, 20, 0]))
    assert torch.equal(found[[0, 2]], known[[3, 0]])
    assert float(found[1]) == pytest.approx(float(known.mean()))


# -- which tensors -------------------------------------------------------------------------------------------------


class Anything(nn.Module):
    """[batch, 8, 32]: operators that are no layers, a tensor whose batch is not first, and one without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.randn(32, 32) / 6), nn.Parameter(torch.randn(50, 32))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bti,ij->btj", x.sin(), self.weight)
        first = (mixed.transpose(0, 1).contiguous().exp() * 0.1).transpose(0, 1)
        common = (self.table * x.abs().mean((0, 1)) * 2).tanh() @ self.weight  # of parameters alone it is no activation
        return (torch.softmax(first @ common.t(), -1) @ common).cos().sum((1, 2))


def test_any_operator_is_compressed_and_only_samples_have_widths_of_their_own():
    torch.manual_seed(0)
    model, batch = Anything(), torch.randn(16, 8, 32) * torch.logspace(-1, 0.5, 16)[:, None, None]
    gact = gact_dist.attach(model, config=Config(policy="actnn", bits=2.5, **SETTINGS))

    def loss_fn(x):
        return model(x).square().sum()

    with gact.step(loss_fn, batch):
        loss_fn(batch)
    with gact.step():
        loss_fn(batch).backward()
    plan = {name.split(":")[-1].split("@")[0]: bits for name, bits in gact.plan.items()}
    assert isinstance(plan["Softmax"], tuple)
    flattened = [bits for name, bits in gact.plan.items() if "UnsafeView" in name]  # [batch * length, channels]
    assert any(isinstance(bits, tuple) for bits in flattened)
    assert isinstance(plan["Exp"], int)  # [length, batch, channels] in memory
    assert isinstance(plan["Tanh"], int)  # as many rows as there are entries in a table
    compressible = [row for row in gact.report().rows if row.name in gact.plan]
    assert len(compressible) >= 5  # others are of the batch, or derived
    assert {row.codec for row in compressible} == {"quantised", "mixed"}
    assert all(row.bytes < math.prod(row.shape) for row in compressible)  # under 8 of 32 bits


def test_nodes_of_a_graph_are_no_samples():
    torch.manual_seed(0)
    nodes, edges = torch.randn(60, 32), torch.randint(0, 60, (2, 300))

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.first(x).tanh()
            return self.second(torch.zeros_like(x).index_add(0, edges[0], x[edges[1]]))

    model = Graph()
    gact = gact_dist.attach(model, config=Config(policy="actnn", **SETTINGS))
    with gact.step(lambda batch: model(*batch).square().mean(), (nodes, edges)):
        model(nodes, edges)
    assert gact.plan
    assert all(isinstance(bits, int) for bits in gact.plan.values())


def test_another_batch_size_keeps_to_the_average():
    model, batch = unequal()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, config=Config(policy="actnn", bits=2, **SETTINGS))
    gact.calibrate(loss_fn, batch, samples=64)
    average = gact.adaptation.average_bits
    for samples in (1, 2, 5, 63):
        with gact.step():
            loss = loss_fn(tuple(tensor[:samples] for tensor in batch))
        loss.backward()
        rows = [row for row in gact.report().rows if row.name in gact.plan]
        elements = sum(math.prod(row.shape) for row in rows)
        assert sum(math.prod(row.shape) * row.bits for row in rows) <= average * elements


def test_with_perturbation_the_keys_alone_decide():
    model, batch = unequal()
    loss_fn = small_models.loss_of(model)
    config = Config(policy="actnn", bits=2, estimator="perturbation", **SETTINGS)
    gact = gact_dist.attach(model, config=config)
    gact.calibrate(loss_fn, batch, samples=64)
    uniform = gact_dist.attach(model, config=Config(policy="uniform", bits=2, min_numel=64))
    expected = variance_of_gradient(model, loss_fn, batch, uniform, draws=8)
    assert variance_of_gradient(model, loss_fn, batch, gact, draws=8) < 0.6 * expected


# -- levels, states and settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["actnn-L0", "actnn-L1", "actnn-L2", "actnn-L3", "actnn-L3.1"])
def test_levels_run(level):
    model, batch = small_models.cnn()
    loss_fn = small_models.loss_of(model)
    gact = gact_dist.attach(model, level)
    for _ in range(2):
        with gact.step(loss_fn, batch, sample_index=torch.arange(16)):
            loss = loss_fn(batch)
        loss.backward()
    rows = gact.report().rows
    kinds = {row.codec for row in rows}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    if level == "actnn-L0":
        assert not rows
        return
    norms = {row.codec for row in rows if row.name.startswith("norm") and row.shape == (16, 16, 16, 16)}
    assert norms <= ({"exact"} if level == "actnn-L1" else {"mixed", "quantised"})
    assert ("mixed" in kinds) == (level in ("actnn-L3", "actnn-L3.1"))
    assert {row.bits for row in rows if row.codec == "quantised"} <= ({4} if level < "actnn-L3" else set(range(1, 9)))
    assert gact.report().ratio > (2.0 if level == "actnn-L1" else 5.0)


def test_a_resumed_run_is_bitwise_the_one_that_was_not_stopped():
    def job(first, last, model, batch, gact):
        loss_fn = small_models.loss_of(model)
        for step in range(first, last):
            with gact.step(loss_fn, batch, sample_index=torch.arange(64) + 64 * (step % 2)):
                loss = loss_fn(batch)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        return small_models.gradient(model)

    config = Config(policy="actnn", adapt_interval=3, **SETTINGS)
    model, batch = unequal()
    gact = gact_dist.attach(model, config=config)
    job(0, 5, model, batch, gact)
    other = copy.deepcopy(model)
    resumed = gact_dist.attach(other, config=config)
    resumed.load_state_dict(gact.state_dict())
    assert resumed.plan == gact.plan
    assert resumed.history == gact.history
    assert any(isinstance(bits, tuple) for bits in gact.plan.values())
    assert torch.equal(job(5, 9, model, batch, gact), job(5, 9, other, batch, resumed))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (list(range(7)), ValueError, "sample_index has 7 numbers, the batch has 8 examples"),
        ([0, 1, 2, 3, 4, 5, 6, -7], ValueError, "sample_index holds -7, expected numbers from 0 up"),
        ([0.5] * 8, TypeError, r"sample_index is torch.float32 \[8\], expected integers"),
        (torch.zeros(8, 1, dtype=torch.int64), TypeError, r"sample_index is torch.int64 \[8, 1\]"),
    ],
)
def test_wrong_numbers_of_samples_say_what_was_expected(index, error, message):
    model, batch = small_models.mlp(batch=8)
    gact = gact_dist.attach(model, "actnn-L3")
    with pytest.raises(error, match=message), gact.step(small_models.loss_of(model), batch, sample_index=index):
        pass


def test_bits_are_an_average_and_no_other_budget_is_taken():
    assert Config(policy="actnn").bits == 2.0
    assert Config(policy="actnn", bits=2.5).bits == 2.5
    with pytest.raises(ValueError, match="expected policy 'gact', which chooses"):
        Config(policy="actnn", retained_bytes=1000)
    assert one_width((3, 2, 2, 2, 2, 2, 2, 2)) == 2
    assert codec.Scheme.MIXED.name.lower() == "mixed"


@pytest.mark.parametrize("level", ["L2.2", "actnn-L3"])
def test_two_bits_on_the_image_model_take_a_twelfth_of_float32(level):
    config = load_config("image")
    sizes = {"channels": config.channels, "blocks_per_stage": config.blocks_per_stage}
    model = ResNet(image_channels=1, classes=10, dropout=0.0, **sizes)
    batch = torch.randn(config.batch_size, 1, 28, 28), torch.randint(0, 10, (config.batch_size,))
    gact, loss_fn = gact_dist.attach(model, level), small_models.loss_of(model)
    for _ in range(2):
        with gact.step(loss_fn, batch, sample_index=range(config.batch_size)):
            loss_fn(batch)
    assert gact.report().ratio > 12
