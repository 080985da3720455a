"""Tensors that backward makes again from others: what they are, that nothing else changes, and what it costs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from derived_jobs import TOKENS, WIDTH, Job, Lambda, check_made_again, distance
from live_storages import StorageCount
from small_models import gpt, loss_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.derived import Expression, over_root_mean_square
from gact_dist.hooks.handles import Recipe, Stored, View
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure, sections


class RMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normal.to(x.dtype)


def gated(x, up):
    return F.silu(x) * up(x)


def in_3d(*modules):
    """Modules in a row on [batch, tokens, WIDTH]."""
    return Lambda(lambda x, *parts: nn.Sequential(*parts)(x.view(4, -1, WIDTH)), *modules)


def in_two_shapes(first, then, shape=(-1, WIDTH)):
    """A module on [batch, tokens, WIDTH], and one on a view of its result."""
    return Lambda(lambda x, a, b: b(a(x.view(4, -1, WIDTH)).view(shape)), first, then)


def scaled_rows(x):
    return x * torch.linspace(1.0, 2.0, len(x)).view(-1, 1)


def scaled_in_another_shape(x, norm):
    """The factor, [16, 1], could be multiplied with what was normalised, [16, 16, WIDTH], along another axis."""
    return scaled_rows(norm(x.view(16, 16, WIDTH)).view(16, -1)).view(-1, WIDTH)


def dropped_as_on_gpus(x, norm):
    return torch.native_dropout(norm(x.view(4, -1, WIDTH)), 0.3, True)[0].view(-1, WIDTH)


# by operator: what stands between two linear layers, and how many tensors are derived
OPERATORS = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH), 1),
    "layer norm without weight": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), 1),
    "layer norm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), 1),
    "layer norm in another shape": (lambda: Lambda(lambda x, n: n(x.view(4, -1, WIDTH)), nn.LayerNorm(WIDTH)), 1),
    "batch norm and relu": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU()), 1),
    "batch norm and relu in place": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU(True)), 1),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), 1),
    "group norm": (lambda: nn.GroupNorm(4, WIDTH), 1),
    "RMS norm": (RMSNorm, 2),
    "gelu": (nn.GELU, 1),
    "gelu by tanh": (lambda: nn.GELU("tanh"), 1),
    "silu": (nn.SiLU, 1),
    "mish": (nn.Mish, 1),
    "softplus": (lambda: nn.Softplus(2.0, 5.0), 1),
    "hardswish": (nn.Hardswish, 1),
    "elu": (lambda: nn.ELU(0.5), 1),
    "selu": (nn.SELU, 1),
    "celu": (lambda: nn.CELU(0.5), 1),
    "a number more": (lambda: Lambda(lambda x, n: 1.5 + n(x), nn.LayerNorm(WIDTH, bias=False)), 1),
    "batch norm and relu6": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU6()), 1),
    "batch norm and relu6 in place": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU6(True)), 1),
    "batch norm and hardtanh": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Hardtanh(-0.5, 1.5)), 1),
    "layer norm and hardsigmoid": (lambda: in_3d(nn.LayerNorm(WIDTH), nn.Hardsigmoid()), 1),
    "batch norm and leaky relu": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.1)), 1),
    "batch norm and leaky relu in place": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.1, True)), 1),
    "layer norm and tanh": (lambda: in_3d(nn.LayerNorm(WIDTH), nn.Tanh()), 1),
    "layer norm and sigmoid": (lambda: in_3d(nn.LayerNorm(WIDTH), nn.Sigmoid()), 1),
    "gated": (lambda: Lambda(gated, nn.Linear(WIDTH, WIDTH)), 2),
    "layer norm and the dropout of GPUs": (lambda: Lambda(dropped_as_on_gpus, nn.LayerNorm(WIDTH)), 1),
    "layer norm and dropout": (lambda: in_3d(nn.LayerNorm(WIDTH), nn.Dropout(0.5)), 1),
    "layer norm and relu": (lambda: in_3d(nn.LayerNorm(WIDTH), nn.ReLU()), 1),
    "gelu, another shape and dropout": (lambda: in_two_shapes(nn.GELU(), nn.Dropout(0.5)), 1),
    "layer norm, another shape and relu": (lambda: in_two_shapes(nn.LayerNorm(WIDTH), nn.ReLU()), 1),
    "layer norm and a factor of rows": (lambda: in_two_shapes(nn.LayerNorm(WIDTH), Lambda(scaled_rows)), 1),
    "group norm and a factor in another shape": (lambda: Lambda(scaled_in_another_shape, nn.GroupNorm(4, 16)), 1),
    "gelu and dropout": (lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5)), 1),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_an_operator_made_is_made_again(operator):
    """From sources that are stored exactly it is what it was, up to a few roundings of float32."""
    make, count = OPERATORS[operator]
    check_made_again(Job(make()), count, 1e-3)


@pytest.mark.parametrize("operator", ["layer norm", "batch norm and relu", "RMS norm", "gated"])
def test_low_precision(operator):
    job = Job(OPERATORS[operator][0]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        job.gradient()
        job.gradient()
        assert len(job.rows("derived")) >= 1
        sources = [row.name for row in job.rows("quantised")]
        exact = job.untouched()
        assert distance(job.gradient(sources), exact) < 2**-7  # a rounding to bfloat16 more


def test_strides_are_those_of_the_tensor():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.n, self.b = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 4, 3)

        def forward(self, x):
            return self.b(F.relu(self.n(self.a(x))))

    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last)
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0)
    made = []
    make = Recipe.make
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)):
            loss = model(x).square().sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recipe, "make", lambda recipe: made.append((recipe, make(recipe))) or made[-1][1])
        loss.backward()
    assert len(made) == 1
    assert made[0][1].stride() == made[0][0].strides
    assert made[0][1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("policy", ["exact", "uniform"])
def test_what_is_not_rounded_or_not_to_be_derived_is_not(policy):
    job = Job(nn.LayerNorm(WIDTH))
    job.gact.detach()
    config = Config(policy=policy) if policy == "exact" else Config(policy=policy, bits=4, derive=False)
    job.gact = gact_dist.attach(job.model, config=config)
    for _ in range(2):
        with job.gact.step():
            job.model(job.x).square().mean().backward()
    assert not job.rows("derived")


def gated_copy(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    x = x.clone()
    return F.gelu(layer(x)) * x


@pytest.mark.parametrize(
    "first",  # of a copy: the batch itself is not rounded
    [
        lambda: Lambda(lambda x, norm: norm(x.clone()), nn.LayerNorm(WIDTH)),
        lambda: Lambda(gated_copy, nn.Linear(WIDTH, WIDTH)),
    ],
)
def test_nothing_is_derived_from_what_is_rounded_and_has_no_graph(first):
    """It has no graph, so what its rounding does by way of others could not be measured."""
    (kept, _), (derived, names) = (squared_error(first, derive) for derive in (False, True))
    assert names == ["3:Gelu"]
    # means of eight, each of thousands of dimensions: a fifteenth apart over seeds
    assert derived == pytest.approx(kept, rel=0.3)


def squared_error(first, derive: bool) -> tuple[float, list[str]]:
    """That of the gradient at 4 bits, a mean of eight; and the names of what is derived."""
    torch.manual_seed(0)
    model = nn.Sequential(first(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH)
    gact = gact_dist.attach(model, config=Config(bits=4, derive=derive, min_numel=16))
    for _ in range(2):
        with gact.step(lambda x: model(x).square().mean(), x):
            model(x).square().mean().backward()
    exact = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    total = 0.0
    for _ in range(8):
        model.zero_grad()
        with gact.step():
            loss = model(x).square().mean()
        loss.backward()
        pairs = zip(model.parameters(), exact, strict=True)
        total += sum(float((parameter.grad - gradient).square().sum()) for parameter, gradient in pairs)
    return total / 8, [row.name.partition("@")[0] for row in gact.report().rows if row.codec == "derived"]


def test_a_derived_tensor_that_is_modified_is_refused():
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    x = torch.randn(TOKENS, WIDTH)
    for modified in (False, False, True):
        with gact.step():
            hidden = F.gelu(model[0](x))
            loss = model[1](hidden).sum()
        if modified:
            assert any(row.codec == "derived" for row in gact.report().rows)
            with torch.no_grad():
                hidden.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


def test_a_second_backward_and_what_a_dropped_graph_holds(monkeypatch):
    handles = []
    kept = Stored.keep

    def noted(stored, payload, tensor, offload):
        kept(stored, payload, tensor, offload)
        handles.append(weakref.ref(stored))

    monkeypatch.setattr(Stored, "keep", noted)
    job = Job(nn.LayerNorm(WIDTH))
    job.gradient()
    with job.gact.step():
        loss = job.model(job.x).square().mean()
    first = torch.autograd.grad(loss, job.model.parameters(), retain_graph=True)
    second = torch.autograd.grad(loss, job.model.parameters(), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert any(isinstance(handle().payload, Recipe) for handle in handles if handle() is not None)
    del loss
    gc.collect()
    assert not any(handle() for handle in handles)


@pytest.mark.parametrize("reads_sign", [False, True])
def test_one_that_must_be_exact_for_another_reader_is_stored(reads_sign):
    """The backward of abs reads the sign of what the second linear layer reads as well."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.n, self.b = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.n(self.a(x))
            loss = self.b(y).square().mean()
            return loss + y.abs().mean() if reads_sign else loss

    torch.manual_seed(0)
    model, x = Net(), torch.randn(TOKENS, WIDTH)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, derive=True))
    for _ in range(3):
        with gact.step():
            loss = model(x)
        loss.backward()
        kinds = {row.name.split(":")[1].split("@")[0]: row.codec for row in gact.report().rows if row.shape == x.shape}
        assert kinds["LayerNorm"] == ("exact" if reads_sign else "derived")


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.kind = nn.LayerNorm(WIDTH), kind

    def forward(self, x):
        if self.kind == "norm last":
            return self.norm(x + self.b(F.gelu(self.a(x))))
        return x + self.b(F.gelu(self.a(self.norm(x))))


class AttentionBlock(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.qkv, self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.view(4, -1, 4, WIDTH // 4).transpose(1, 2) for part in (3.0 * self.qkv(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.b(F.gelu(self.a(attended.reshape(x.shape))))


class ProbabilitiesBlock(nn.Module):
    """Attention in separate operators, whose probabilities are derived; those that are dropped are constants."""

    def __init__(self, kind):
        super().__init__()
        self.qkv, self.a = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.in_operators, self.left = "operators" in kind, torch.rand(4, 4, TOKENS // 4, TOKENS // 4) < 0.75
        self.mask = torch.ones(TOKENS // 4, TOKENS // 4, dtype=torch.bool).tril(8)

    def forward(self, x):
        q, k, v = (part.view(4, -1, 4, WIDTH // 4).transpose(1, 2) for part in (2.0 * self.qkv(x)).chunk(3, -1))
        if self.in_operators:
            attended = (F.softmax(q @ k.transpose(-2, -1) / 4, -1) * self.left) @ v
        else:
            with sdpa_kernel(SDPBackend.MATH):
                attended = F.scaled_dot_product_attention(q, k, v, self.mask)
        return x + self.a(attended.transpose(1, 2).reshape(x.shape))


class ExpertsBlock(nn.Module):
    """Each expert reads its rows of what all of them share, as in GraniteMoe: a small part, for which the
    whole is too much to be made again, is stored."""

    def __init__(self, _):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        many, few = TOKENS * 29 // 64, TOKENS * 3 // 32
        rows = (F.silu(self.gate(x)) * self.up(x)).split([many, few, many])
        return x + torch.cat([expert(part) for expert, part in zip(self.experts, rows, strict=True)])


class PartBlock(nn.Module):
    """Of one tensor a small part is stored, and what is made of the rest is derived."""

    def __init__(self, _):
        super().__init__()
        self.gate, self.up, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        few, rest = (F.silu(self.gate(x)) * self.up(x)).split([TOKENS // 8, TOKENS - TOKENS // 8])
        return x + torch.cat([self.a(few), self.b(2.0 * rest)])


class ReluBlock(nn.Module):
    """Of relu's result only a mask is stored, and what is made of it is derived."""

    def __init__(self, _):
        super().__init__()
        self.a, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.a(2.0 * F.relu(self.norm(x)))


class PiecesBlock(nn.Module):
    """Activations that consist of pieces, of which one bit is stored, or that save their results alone."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        activations = {
            "relu6": nn.Hardtanh(-0.2, 0.7, inplace=True), "leaky": nn.LeakyReLU(0.2), "tanh": nn.Tanh(),
            "sigmoid": nn.Sigmoid(),
        }  # fmt: skip
        self.activation = activations[kind.split()[0]]

    def forward(self, x):
        return x + self.b(self.activation(self.norm(self.a(x))))


class NumberBlock(nn.Module):
    """As transformers writes GELU by tanh: neither the sum nor what it adds the number to saves the number."""

    def __init__(self, _):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.a(x)
        return x + self.b(0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.045 * torch.pow(h, 3.0)))))


class SwishBlock(nn.Module):
    """The sigmoid saves its result before the product saves what it is made of."""

    def __init__(self, _):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.a(x)
        return x + self.b(h * torch.sigmoid(1.702 * h))


class Blocks(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.last, self.kind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), kind
        kinds = {
            "attention": AttentionBlock, "probabilities": ProbabilitiesBlock, "experts": ExpertsBlock,
            "part": PartBlock, "number": NumberBlock, "relu": ReluBlock, "swish": SwishBlock,
            **dict.fromkeys(("relu6", "leaky", "tanh", "sigmoid"), PiecesBlock),
        }  # fmt: skip
        block = kinds.get(kind.split()[0], Block)
        self.blocks = nn.ModuleList(block(kind) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        if "leaf" in self.kind:  # as a pipeline stage has it, or PEFT after a frozen embedding
            x = x.detach().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    "kind",
    [
        "norm first", "norm last", "in sections", "attention", "attention in sections", "leaf", "leaf in sections",
        "probabilities", "probabilities in sections", "probabilities by operators", "experts", "experts in sections",
        "part", "part in sections", "number", "number in sections",
        "relu", "relu in sections", "relu6", "relu6 in sections", "leaky", "tanh",
        "tanh in sections", "sigmoid", "swish", "swish in sections",
    ],
)  # fmt: skip
def test_the_sensitivity_of_a_source_counts_what_is_made_of_it(kind, monkeypatch):
    """Each tensor alone at 4 bits, all else exact: the predicted variance is the measured one.

    Eight directions and twelve draws: a relative standard deviation of about 0.08 / sqrt(8) and, with thousands of
    elements, a few percent for the draws. What a block derives from another one's tensor is stored.
    """
    if "in sections" in kind:
        monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    torch.manual_seed(0)
    model, x, y = Blocks(kind), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    parameters = [parameter for part in (model.blocks, model.last) for parameter in part.parameters()]
    if "leaf" not in kind:
        parameters += model.first.parameters()

    def loss():
        return (model(x) - y).square().mean()

    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4, derive=True), 0)
    for _ in range(2):
        with hooks.rehearsal(Plan(default=4)):
            loss()
    found = measure(hooks, model, loss, seed=1, probes=8)
    made = hooks.state_dict()["derived"]["elements"]
    assert len(made) == {
        "experts": 9,
        "in sections": 6,
        "norm first": 6,
        "attention": 6,
        "leaf": 6,
        "part": 6,
        "number": 12,
        "probabilities by operators": 6,
        "swish": 6,
    }.get(kind.removesuffix(" in sections"), 3)
    assert not {item.name for item in found} & set(made)
    exact = torch.autograd.grad(loss(), parameters)
    plan = {**dict.fromkeys((item.name for item in found), None), **dict.fromkeys(made, 4)}
    for item in found:
        error = 0.0
        for draw in range(12):
            with hooks.rehearsal(Plan({**plan, item.name: 4}), draw=draw + 1):
                rounded = loss()
            gradient = torch.autograd.grad(rounded, parameters)
            error += sum(float((a - b).square().sum()) for a, b in zip(gradient, exact, strict=True)) / 12
        assert float(item.variance[3]) == pytest.approx(error, rel=0.15), item.name


def test_what_was_learnt_is_in_the_state():
    job = Job(nn.LayerNorm(WIDTH))
    job.gradient()
    state = job.gact.state_dict()
    name = job.rows("derived")[0].name
    other = Job(nn.LayerNorm(WIDTH))
    other.gact.load_state_dict(state)
    assert other.gact._schedule.hooks.state_dict()["derived"] == {
        "elements": {name: TOKENS * WIDTH},
        "again": {},
        "stored_anyway": [],
    }


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_as_the_fused_operator_saves_it(owns, dtype, weighted):
    """The operator itself is one of GPUs: tests/gpu."""
    x = torch.randn(4, 8, WIDTH).to(dtype)
    weight = (torch.rand(WIDTH) + 0.5).to(dtype) if weighted else None
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    expected = F.rms_norm(x, (WIDTH,), weight, 1e-6)
    made = over_root_mean_square(owns, x.clone(), rstd, weight).to(dtype).view(x.shape)
    rounding = 1e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(made, expected, rtol=rounding, atol=rounding)


def held_while_made(expression: Expression) -> tuple[torch.Tensor, int]:
    """(its value, most bytes of storages that operators returned meanwhile)."""
    with StorageCount() as count:
        made = expression.restore()
    return made, count.peak_bytes


def test_what_is_made_takes_the_memory_of_what_was_decoded_for_it():
    """With two tensors at a time, the peak of a step would be higher than where all is stored."""
    x = torch.randn(TOKENS, WIDTH)
    stored = Stored("x", x, codec.pack(x, 4, 1))
    expected = F.gelu(stored.restore())
    made, peak_bytes = held_while_made(Expression(F.gelu, stored, in_place=torch.ops.aten.gelu_))
    assert torch.equal(made, expected)
    assert x.nbytes <= peak_bytes < 1.1 * x.nbytes
    assert held_while_made(Expression(F.gelu, stored))[1] >= 2 * x.nbytes
    assert torch.equal(F.gelu(stored.restore()), expected)  # what is kept is as it was


@pytest.mark.parametrize("kind", ["an alias", "exact", "repeated elements"])
def test_memory_that_something_else_reads_is_not_written_to(kind):
    x = torch.randn(1 if kind == "repeated elements" else TOKENS, WIDTH)
    stored = Stored("x", x, x.detach() if kind == "an alias" else codec.pack(x, None if kind == "exact" else 4, 1))
    handle = View(stored, x.expand(TOKENS, WIDTH), 0)
    before = handle.restore().clone()
    made = Expression(F.gelu, handle, in_place=torch.ops.aten.gelu_).restore()
    torch.testing.assert_close(made, F.gelu(before))
    assert torch.equal(handle.restore(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_that_is_added_may_be_another_in_each_step(dtype):
    number = [1.0]
    job = Job(Lambda(lambda x, norm: norm(x) + number[0], nn.LayerNorm(WIDTH)))
    job.model.to(dtype)
    job.x = job.x.to(dtype)
    for _ in range(5):
        job.gradient()  # the last ones are not observed
    sources = [row.name for row in job.rows("quantised")]
    for number[0] in (1.0, -3.0, 0.25):
        assert distance(job.gradient(sources), job.untouched()) < (1e-5 if dtype == torch.float32 else 2**-6)
        assert len(job.rows("derived")) == 1


def test_a_tensor_without_a_graph_is_no_number():
    added = torch.linspace(-1.0, 1.0, WIDTH)
    job = Job(Lambda(lambda x, norm: norm(x) + added, nn.LayerNorm(WIDTH)))
    for _ in range(5):
        job.gradient()
    assert not job.rows("derived")
    assert distance(job.gradient([row.name for row in job.rows("quantised")]), job.untouched()) == 0.0


def test_the_report_says_what_a_tensor_is_made_from():
    model, batch = gpt()
    gact = gact_dist.attach(model, config=Config.from_level("L2", min_numel=16))
    for _ in range(4):  # settled ones among them
        with gact.step(loss_of(model), batch):
            loss = loss_of(model)(batch)
        loss.backward()
    report = gact.report()
    sources = {row.name: row.made_from for row in report.rows}
    assert sources["blocks.0.down:Gelu@4"] == ("blocks.0:Addmm@8",)
    qkv = {f"blocks.1:Addmm@6{number}" for number in ("", "#1", "#2")}
    assert set(sources["blocks.1:ScaledDotProductAttention@6"]) == set(sources["blocks.1:Input@6"]) == qkv
    for row in report.rows:
        assert bool(row.made_from) is (row.codec == "derived")
        assert sources.keys() >= set(row.made_from)
        if row.made_from:
            assert f"from {', '.join(row.made_from)}" in str(report)
