"""Gradient checkpointing under a step: block inputs compressed, nothing packed twice, wrong nestings named."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from small_models import Mixture, Routed, TinyGPT, loss_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gact_dist
from gact_dist import Config, codec

ANY_MODE = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
UNIFORM = Config(policy="uniform", bits=4, min_numel=16)


class Checkpointed(TinyGPT):
    """TinyGPT with every block under a checkpoint."""

    def __init__(self, reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def job(reentrant: bool, dropout: float = 0.0):
    torch.manual_seed(0)
    model = Checkpointed(reentrant, dropout)
    tokens = torch.randint(0, 37, (8, 33))
    return model, loss_of(model), (tokens[:, :-1], tokens[:, 1:])


def step(gact, loss_fn, batch):
    with gact.step():
        loss = loss_fn(batch)
    return loss


@ANY_MODE
def test_block_inputs_are_compressed_from_the_second_step_on(reentrant):
    model, loss_fn, batch = job(reentrant)
    gact = gact_dist.attach(model, config=UNIFORM)
    codecs = []
    for _ in range(2):
        step(gact, loss_fn, batch).backward()
        codecs.append([row.codec for row in gact.report().rows if row.name.startswith(":BlockInput")])
    assert codecs == [["exact", "exact"], ["quantised", "quantised"]]


@ANY_MODE
def test_block_inputs_stay_exact_where_the_config_says_so(reentrant):
    model, loss_fn, batch = job(reentrant)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=16, checkpoint_inputs=False))
    for _ in range(2):
        step(gact, loss_fn, batch).backward()
    assert {row.codec for row in gact.report().rows if row.name.startswith(":BlockInput")} == {"exact"}


@ANY_MODE
def test_nothing_is_packed_while_backward_recomputes(reentrant, monkeypatch):
    model, loss_fn, batch = job(reentrant)
    gact = gact_dist.attach(model, config=UNIFORM)
    step(gact, loss_fn, batch).backward()
    gact.install_hook()  # these stay on during backward
    loss = loss_fn(batch)
    packed = []
    original = codec.pack
    monkeypatch.setattr(codec, "pack", lambda *args, **options: packed.append(args) or original(*args, **options))
    loss.backward()
    gact.uninstall_hook()
    assert packed == []


class CountingReLU(nn.Module):
    """[batch, 32] -> [batch, 32]: a layer and a relu; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.forwards = nn.Linear(32, 32), 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.relu(self.linear(x))


@ANY_MODE
def test_saving_the_relu_that_ends_a_block_does_not_recompute_the_block(reentrant):
    """Its node's slot for the result, which tells whether relu itself is saving, belongs to the checkpoint."""
    block, head = CountingReLU(), nn.Linear(32, 4)
    gact = gact_dist.attach(nn.Sequential(block, head), config=UNIFORM)
    x = torch.randn(64, 32, requires_grad=True)
    for step in range(1, 4):
        with gact.step():
            loss = head(checkpoint(block, x, use_reentrant=reentrant)).square().sum()
        assert block.forwards == 2 * step - 1
        loss.backward()
        assert block.forwards == 2 * step


@ANY_MODE
def test_recomputed_dropout_is_the_one_of_the_forward(reentrant):
    """With exact codecs any other mask would change the gradient; the plain job is the reference."""
    gradients = []
    for config in (None, Config(policy="exact")):
        model, loss_fn, batch = job(reentrant, dropout=0.3)
        torch.manual_seed(3)
        if config is None:
            loss_fn(batch).backward()
        else:
            step(gact_dist.attach(model, config=config), loss_fn, batch).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_step_inside_a_checkpoint_is_refused(reentrant):
    model = nn.Linear(64, 64)
    gact = gact_dist.attach(model, config=UNIFORM)

    def block(x: Tensor) -> Tensor:
        with gact.step():
            return model(x)

    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Open the step around the checkpoint instead"):
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()


@ANY_MODE
@pytest.mark.parametrize("config", [UNIFORM, Config(bits=4, min_numel=16)], ids=["uniform", "gact"])
def test_following_a_module_inside_a_checkpoint_is_refused(reentrant, config):
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    gact = gact_dist.attach(model, config=config).follow()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"Open the step around the checkpoint instead"):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    gact.detach()
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()


@ANY_MODE
@pytest.mark.parametrize("policy", ["uniform", "gact"])
def test_inputs_of_a_routing_block_stay_exact(reentrant, policy):
    torch.manual_seed(0)
    model, x = Mixture(reentrant), torch.randn(256, 64)

    def loss_fn(batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    gact = gact_dist.attach(model, config=Config(policy=policy, bits=2, min_numel=16, adapt_interval=1))
    for _ in range(4):
        with gact.step(loss_fn, x):
            loss = loss_fn(x)
        loss.backward()  # a routing that changed would raise here, or give another gradient without a word
    codecs = [row.codec for row in gact.report().rows if row.name.startswith(":BlockInput")]
    assert codecs == ["exact", "quantised"]  # the first beside what tanh saves of the same tensor, rounded


class OneRouter(nn.Module):
    """[tokens, 64] -> [tokens, 64]: a block that routes before five that do not, each under a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.routed = nn.Linear(64, 64), Routed()
        self.plain = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.routed, torch.tanh(self.first(x)), use_reentrant=self.reentrant)
        for block in self.plain:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@ANY_MODE
def test_blocks_after_one_that_routes_are_not_taken_for_it(reentrant):
    """Frames of checkpoint() calls that are over leave their addresses to later ones."""
    torch.manual_seed(0)
    model, x = OneRouter(reentrant), torch.randn(256, 64)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=2, min_numel=16))
    for _ in range(2):
        with gact.step():
            loss = model(x).square().mean()
        loss.backward()
    codecs = [row.codec for row in gact.report().rows if row.name.startswith(":BlockInput")]
    assert codecs == ["exact", *["quantised"] * 5]


def joined(x: Tensor, given: object = None, *, weight: Tensor, **rest: object) -> Tensor:
    """Of x @ weight and the sum of all other tensors that it is given, wherever."""
    return torch.tanh(x @ weight + sum(leaf for leaf in tree_leaves((given, rest)) if isinstance(leaf, Tensor)))


def joined_pair(given: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    return joined(*given, weight=weight)


def closing_over(weight: Tensor, bias: Tensor):
    def inner(x: Tensor) -> Tensor:
        return joined(x, bias, weight=weight)

    return lambda x: inner(x)


class Given(nn.Module):
    """One checkpoint that is given its tensors in some way: way(checkpoint of a mode, x, bias, weight)."""

    def __init__(self, way, reentrant: bool) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.eye(64)), way
        self.run = partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.way(self.run, x * 1.0, bias + 0, self.weight)  # the bias itself is part of the batch


def held(way, reentrant: bool, config: Config, bias: Tensor) -> list[tuple[str, str, int]]:
    """(what it was given as, codec, bytes) of what a step's report says a checkpoint kept past the hooks."""
    model, x = Given(way, reentrant), torch.randn(256, 64, requires_grad=True)
    gact = gact_dist.attach(model, config=config)
    with gact.step():
        out = model(x, bias)
    out.sum().backward()
    rows = [(re.match(r":BlockInput \((.*)\)@", row.name), row) for row in gact.report().rows]
    return [(match[1], row.codec, row.bytes) for match, row in rows if match]


@ANY_MODE
@pytest.mark.parametrize(
    ("given", "way"),
    [
        ("argument 1[0]", lambda run, x, b, w: run(partial(joined, weight=w), x, (b, None))),
        ("argument 1['b'][0]", lambda run, x, b, w: run(partial(joined, weight=w), x, {"b": [b]})),
        ("partial b", lambda run, x, b, w: run(partial(partial(joined, b=b), weight=w), x)),
        ("closure bias", lambda run, x, b, w: run(closing_over(w, b), x)),
    ],
    ids=["tuple", "dict", "partial", "closure"],
)
def test_tensors_that_a_checkpoint_keeps_past_the_hooks_are_reported(given, way, reentrant):
    bias = torch.randn(256, 64)
    for config in (UNIFORM, Config(policy="exact")):
        assert held(way, reentrant, config, bias) == [(given, "exact", bias.nbytes)]


@pytest.mark.parametrize(
    ("given", "way"),
    [
        (["keyword b"], lambda run, x, b, w: run(joined, x, b=b, weight=w)),
        (["keyword b[0]"], lambda run, x, b, w: run(joined, x, b=[b], weight=w)),
        (["keyword x", "keyword b"], lambda run, x, b, w: run(joined, x=x, b=b, weight=w)),
        (["argument 0[0]", "argument 0[1]"], lambda run, x, b, w: run(joined_pair, (x, b), weight=w)),
    ],
    ids=["keyword", "keyword list", "keywords only", "no positional tensor"],
)
def test_tensors_given_by_keyword_are_reported(given, way):
    """Only a non-reentrant checkpoint takes keywords, or keeps anything where no argument is a tensor."""
    bias = torch.randn(256, 64)
    for config in (UNIFORM, Config(policy="exact")):
        assert held(way, False, config, bias) == [(name, "exact", bias.nbytes) for name in given]


def test_a_keyword_counts_beside_what_was_rounded_of_it():
    """tanh's own result is stored in 4 bits, and checkpoint keeps it exactly: both are retained."""
    bias = torch.randn(256, 64, requires_grad=True)
    found = held(lambda run, x, b, w: run(joined, x, b=torch.tanh(b), weight=w), False, UNIFORM, bias)
    assert found == [("keyword b", "exact", bias.nbytes)]


@ANY_MODE
def test_what_a_layer_of_transformers_is_given_by_keyword_is_reported(reentrant):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=37))
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    gact = gact_dist.attach(llama.train(), config=UNIFORM)
    tokens = torch.randint(0, 37, (8, 32))
    with gact.step():
        loss = llama(input_ids=tokens, labels=tokens).loss
    loss.backward()
    rows = {row.name.split(":BlockInput ")[-1].split("@")[0]: row for row in gact.report().rows}
    for part in (0, 1):  # cosine and sine, which all layers share
        row = rows[f"(partial position_embeddings[{part}])"]
        assert (row.codec, row.shape, row.bytes) == ("exact", (1, 32, 16), 4 * 32 * 16)


KEPT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def policy_of_attention(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def says_whether(context: object, operator: object, *args: object, **kwargs: object) -> bool:
    return operator == KEPT


@pytest.mark.parametrize("kept", [[KEPT], policy_of_attention, says_whether], ids=["list", "policy", "bool"])
def test_what_a_selective_checkpoint_keeps_is_reported(kept):

    class Selective(TinyGPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            contexts = partial(create_selective_checkpoint_contexts, kept)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return self.head(self.norm(x))

    def gradients(compress: bool) -> tuple[list[Tensor], list]:
        torch.manual_seed(0)
        model = Selective()
        tokens = torch.randint(0, 37, (8, 33))
        gact = gact_dist.attach(model, config=Config.from_level("exact")) if compress else None
        with gact.step() if gact else nullcontext():
            loss = loss_of(model)((tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        rows = gact.report().rows if gact else ()
        return [p.grad for p in model.parameters()], [row for row in rows if "flash_attention" in row.name]

    untouched, _ = gradients(False)
    exact, rows = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(untouched, exact, strict=True))
    # the output and the logsumexp of the attention of each of the two blocks
    assert sorted(row.shape for row in rows) == [(8, 4, 32)] * 2 + [(8, 4, 32, 16)] * 2
    assert all(row.codec == "exact" and row.bytes == 4 * math.prod(row.shape) for row in rows)


@ANY_MODE
def test_checkpoints_that_transformers_switches_on(reentrant):
    """gradient_checkpointing_enable(): exact bitwise, and its block inputs rounded from the second step on."""

    def train(config: Config | None) -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 37, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        gact = gact_dist.attach(model, config=config) if config else None
        tokens = torch.randint(0, 37, (8, 32))
        for _ in range(2):
            with gact.step() if gact else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        rows = gact.report().rows if gact else ()
        return [p.grad for p in model.parameters()], [row.codec for row in rows if "BlockInput@" in row.name]

    untouched, _ = train(None)
    exact, _ = train(Config.from_level("exact"))
    assert all(torch.equal(a, b) for a, b in zip(untouched, exact, strict=True))
    rounded, codecs = train(UNIFORM)
    assert codecs == ["quantised", "quantised"]
    assert not all(torch.equal(a, b) for a, b in zip(untouched, rounded, strict=True))


@ANY_MODE
def test_sensitivity_of_block_inputs_predicts_the_gradient_variance(reentrant):
    """Twelve draws of the rounding against the prediction; at 8 bits the response is linear to a few percent.

    Twelve squared distances, each a sum over some ten tensors of thousands of roundings, vary by under 10% together,
    and four probes by 5% for each tensor: 35% is more than three times both.
    """
    model, loss_fn, batch = job(reentrant)
    gact = gact_dist.attach(model, config=Config(bits=8, min_numel=16))
    for _ in range(2):
        gact.calibrate(loss_fn, batch, samples=8)

    def gradient(loss: Tensor) -> Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient(loss_fn(batch))
    distances = [float((gradient(step(gact, loss_fn, batch)) - exact).square().sum()) for _ in range(12)]
    assert sum(distances) / 12 == pytest.approx(gact.adaptation.predicted_variance, rel=0.35)


@pytest.mark.parametrize(("given", "expected"), [(None, False), (True, True), (False, False)])
def test_what_a_selective_checkpoint_keeps_bypasses_hooks_unless_the_job_says_otherwise(given, expected):
    """From torch 2.14 on its mode has an attribute for that, and warns where it is None and there are hooks."""
    model, loss_fn, batch = job(False)
    contexts, seen = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]), []

    def told():
        keeping, kept = contexts()
        keeping.respect_saved_tensors_hooks = given  # as checkpoint() of 2.14 does
        seen.append(keeping)
        return keeping, kept

    has_argument = hasattr(contexts()[0], "respect_saved_tensors_hooks")
    options = {"respect_saved_tensors_hooks": given} if has_argument else {}
    model.forward = lambda tokens: model.head(
        checkpoint(model.blocks[0], model.embedding(tokens), use_reentrant=False, context_fn=told, **options)
    )
    gact = gact_dist.attach(model, config=replace(UNIFORM, checkpoint_inputs=False))
    step(gact, loss_fn, batch).backward()
    assert [mode.respect_saved_tensors_hooks for mode in seen] == [expected]
