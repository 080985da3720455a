"""Models whose forward is wired in every way that blocks can be, each with its batch and its loss function."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from small_models import TinyGPT, gpt, loss_of
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

WIDTH, CLASSES = 16, 5


class Case(NamedTuple):
    model: nn.Module
    loss_fn: Callable[[Any], Tensor]
    batch: Any


class Layer(nn.Module):
    """A residual block, with a second branch and random numbers where asked for."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Sigmoid())
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(x)), self.dropout, self.training)
        return x + self.down(hidden) * self.inner(x)


class Stack(nn.Module):
    """[rows, WIDTH] -> [rows, CLASSES]: blocks in a row; what runs them is overridden."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.enter, self.blocks, self.leave = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(torch.tanh(self.enter(x))))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows_of(count: int = 24) -> tuple[Tensor, Tensor]:
    return torch.randn(count, WIDTH), torch.randint(0, CLASSES, (count,))


def on_rows(model: nn.Module) -> Case:
    return Case(model, loss_of(model), rows_of())


def layers(count: int = 3, **options: Any) -> list[Layer]:
    return [Layer(**options) for _ in range(count)]


def small_gpt(**options: Any) -> Case:
    model, batch = gpt(batch=2, length=12, width=WIDTH, layers=3, **options)
    return Case(model, loss_of(model), batch)


# -- checkpoints ----------------------------------------------------------------------------------------------


class CheckpointedGPT(TinyGPT):
    """how: calls a block under a checkpoint."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__(width=WIDTH, layers=3, dropout=0.1)
        self.how = how

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.how(block, x)
        return self.head(self.norm(x))


def selective(block: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def closure(block: nn.Module, x: Tensor) -> Tensor:
    """What it computes with is no argument: a scale, and a tensor of the graph."""
    scale, skip = 0.5, torch.sigmoid(x)

    def run(y: Tensor) -> Tensor:
        return block(y) + scale * y * skip.detach()

    return checkpoint(run, x, use_reentrant=False)


def plain(block: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(block, x, use_reentrant=reentrant)


def checkpointed(how: Callable[[nn.Module, Tensor], Tensor]) -> Case:
    case = small_gpt()
    model = CheckpointedGPT(how)
    return Case(model, loss_of(model), case.batch)


class WithState(nn.Module):
    """Beside its rows it returns a state for the next layer, as Pegasus-X does. The last one's is read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = Layer(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x + state)
        return x, self.state(state) + x


class Carrying(Stack):
    def through(self, x: Tensor) -> Tensor:
        state = x
        for block in self.blocks:
            x, state = block(x, state)
        return x


class Wrapped(nn.Module):
    """A block whose own forward holds the checkpoint, as torch's checkpoint_wrapper has it."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return plain(self.block, x, self.reentrant)


class Halves(nn.Module):
    """A block with two checkpoints, and operators before, between and after them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm = block, Layer(dropout=0.1), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + plain(self.first, self.norm(x), False)
        return torch.tanh(x) + plain(self.second, torch.sigmoid(x), False)


def with_inner_checkpoints(wrap: Callable[[nn.Module], nn.Module]) -> Case:
    case = small_gpt(dropout=0.1)
    case.model.blocks = nn.ModuleList(map(wrap, case.model.blocks))
    return case


class LeafGPT(TinyGPT):
    """Under adapters: the first block's input is a leaf that requires a gradient, as enable_input_require_grads() has
    it."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).detach().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CheckpointedLeafGPT(LeafGPT):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(width=WIDTH, layers=3)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).detach().requires_grad_()
        for block in self.blocks:
            x = plain(block, x, self.reentrant)
        return self.head(self.norm(x))


class WithoutStem(Stack):
    """The first block reads the batch: nothing below it has a graph but parameters."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)


def leaf_into_checkpoints(reentrant: bool = False) -> Case:
    case = small_gpt()
    model = CheckpointedLeafGPT(reentrant)
    return Case(model, loss_of(model), case.batch)


def leaf_into_inner_checkpoints() -> Case:
    case = small_gpt()
    model = LeafGPT(width=WIDTH, layers=3)
    model.blocks = nn.ModuleList(Wrapped(block, reentrant=False) for block in model.blocks)
    return Case(model, loss_of(model), case.batch)


class InSegments(TinyGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, self.embedding(tokens), use_reentrant=False)
        return self.head(self.norm(x))


def in_segments() -> Case:
    case = small_gpt()
    model = InSegments(width=WIDTH, layers=4, dropout=0.1)
    return Case(model, loss_of(model), case.batch)


# -- wiring ---------------------------------------------------------------------------------------------------


def convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Images [batch, 1, 8, 8] -> logits [batch, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = convolutions(1, 4), convolutions(4, 8), convolutions(8, 8)
        self.up2, self.up1, self.out = convolutions(16, 8), convolutions(12, 4), nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([second, F.interpolate(bottom, scale_factor=2)], 1))
        x = self.up1(torch.cat([first, F.interpolate(x, scale_factor=2)], 1))
        return self.out(x).mean((2, 3))


def unet() -> Case:
    model = UNet()
    return Case(model, loss_of(model), (torch.randn(4, 1, 8, 8), torch.randint(0, CLASSES, (4,))))


class EncoderDecoder(nn.Module):
    """The encoder's output goes to every block of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, WIDTH)
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        source, target = self.embedding(tokens.flip(1)), self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.core(source, target, tgt_mask=mask))


def encoder_decoder() -> Case:
    batch = small_gpt().batch
    model = EncoderDecoder()
    return Case(model, loss_of(model), batch)


class CalledTwice(Stack):
    """Blocks share weights over depth (ALBERT); one of them sees two tensors of the graph between its calls."""

    def through(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks, self.blocks[0]):
            x = block(torch.sin(x))
        return x


class Stages(nn.Module):
    """Stages of blocks with what makes the rows shorter between them, as in a Swin transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(layers(2, width=width)), "merge": nn.Linear(width, width // 2)})
            for width in (WIDTH, WIDTH // 2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH // 4), nn.Linear(WIDTH // 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            for block in stage["blocks"]:
                x = block(x)
            x = stage["merge"](x)
        return self.head(self.norm(x))


class Expanded(Stack):
    """Blocks get one row for all rows, expanded, and save it so."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(torch.sin(x.mean(0, keepdim=True)).expand_as(x))
        return x


class Branch(Stack):
    """A block is skipped, as data decides."""

    def through(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 1 or float(x.detach().sum()) > 1e9 else torch.exp(0.1 * x)
        return x


class Squared(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).pow(2)


class Powers(Stack):
    """Blocks end in powers, which are multiplied outside of them."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x) * (1.0 + x))
        return x


@dataclass
class Hidden:
    state: Tensor
    parts: tuple[Tensor, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)


class Structured(nn.Module):
    """Arguments and outputs are nested structures; some of their tensors have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor, *, hidden: Hidden | None = None, masks: Any = None) -> dict[str, Any]:
        gate = torch.sigmoid(self.first(x))
        if hidden is not None:
            gate = gate * hidden.state + hidden.parts[0] * hidden.more["gate"]
        if masks is not None:
            gate = gate.masked_fill(masks[0], 0.0) * masks[1]["scale"]
        return {"out": torch.tanh(self.second(gate) + x) + self.gate(gate), "gate": (gate, 3), "name": "a block"}


class Wired(Stack):
    def __init__(self) -> None:
        super().__init__(*(Structured() for _ in range(4)))

    def through(self, x: Tensor) -> Tensor:
        mask, scale = torch.arange(WIDTH) < 3, torch.linspace(0.5, 1.5, WIDTH)
        skip = torch.exp(0.1 * x)
        first = self.blocks[0](x)
        hidden = Hidden(first["out"], (skip,), {"gate": first["gate"][0], "layer": 1})
        second = self.blocks[1](first["out"], hidden=hidden, masks=(mask, {"scale": scale}))
        again = self.blocks[0](second["out"], hidden=hidden)
        hidden = Hidden(again["out"], (second["out"], skip), {"gate": second["gate"][0]})
        return self.blocks[2](again["out"] * skip, hidden=hidden, masks=(mask, {"scale": 2.0}))["out"] + skip


class ModelOutputs(Stack):
    """Blocks return what models of transformers return."""

    class Block(Layer):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
            from transformers.modeling_outputs import BaseModelOutputWithPooling

            found = super().forward(x if scale is None else x * scale)
            return BaseModelOutputWithPooling(last_hidden_state=found, pooler_output=torch.sigmoid(found))

    def __init__(self) -> None:
        super().__init__(*(self.Block() for _ in range(3)))

    def through(self, x: Tensor) -> Tensor:
        pooled = None
        for block in self.blocks:
            found = block(x, scale=pooled)
            x, pooled = found.last_hidden_state, found.pooler_output
        return x + pooled


class Rotary(nn.Module):
    """Attention with tables of angles and a mask among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = (part * angles[0] + part.roll(4, -1) * angles[1] for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class RotaryModel(Stack):
    def __init__(self) -> None:
        super().__init__(*(Rotary() for _ in range(3)))

    def through(self, x: Tensor) -> Tensor:
        turns = torch.arange(12.0)[:, None] * torch.linspace(1.0, 0.1, WIDTH // 2)
        mask = torch.ones(12, 12).tril().bool()
        x = x.unflatten(0, (2, 12))
        for block in self.blocks:
            x = block(x, angles=(turns.cos(), turns.sin()), mask=mask)
        return x.flatten(0, 1)


# -- surroundings -----------------------------------------------------------------------------------------------


class Counting(Layer):
    """What it computes depends on a buffer that it changes, in place and by another one in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return super().forward(x * (1 + 0.5 * self.calls) - self.mean)


class Normed(nn.Module):
    """Spectral norm, whose power iteration writes buffers in training, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.sigmoid(self.norm(self.linear(x))))


class LayerDrop(Layer):
    """Random numbers of Python and NumPy decide what it does."""

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            x = torch.sin(x)
        return super().forward(x * float(np.random.uniform(0.5, 1.5)))


def under_autocast() -> Case:
    model, _, batch = small_gpt(dropout=0.1)

    def loss_fn(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[0])
        return F.cross_entropy(logits.float().flatten(0, -2), batch[1].flatten())

    return Case(model, loss_fn, batch)


# -- parameters -------------------------------------------------------------------------------------------------


def tied() -> Case:
    case = small_gpt()
    case.model.head.weight = case.model.embedding.weight
    return case


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base.requires_grad_(False), nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora() -> Case:
    case = small_gpt()
    case.model.requires_grad_(False)
    for block in case.model.blocks:
        block.qkv, block.down = LoRA(block.qkv), LoRA(block.down)
    return case


def frozen() -> Case:
    """All but the norms and the last block."""
    case = small_gpt()
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_("norm" in name or name.startswith("blocks.2"))
    return case


# -- changes in place -------------------------------------------------------------------------------------------


class ChangedAfter(Stack):
    """The output of a block is changed in place."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu_()
        return x


class ChangesInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


# -- without a second derivative ----------------------------------------------------------------------------------


class Opaque(torch.autograd.Function):
    """exp() whose backward is out of autograd's sight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.exp(0.5 * x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 0.5 * gradient * y


class WithFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(Opaque.apply(x)))


def opaque_in_inner_checkpoints() -> Case:
    return on_rows(Stack(Layer(), Wrapped(Bags(), reentrant=False), Layer()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x.unflatten(0, (-1, 8)))[0].flatten(0, 1)


class Bags(nn.Module):
    """Sums of embeddings, weighted by what the network has computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weigh = nn.EmbeddingBag(20, WIDTH, mode="sum"), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(4 * len(x)).view(len(x), 4) * 7 % 20
        return x + self.table(words, per_sample_weights=torch.sigmoid(self.weigh(x)))


class BesideBags(nn.Module):
    """Rows of words -> logits: single layers, of which one has no second derivative, and no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bags, self.second = nn.Linear(WIDTH, WIDTH), Bags(), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bags(torch.tanh(self.first(x)))
        return self.head(torch.tanh(self.second(F.gelu(x))))


def beside_layers(block: nn.Module) -> Case:
    return on_rows(Stack(Layer(), block, Layer()))


# -- models of libraries ----------------------------------------------------------------------------------------


def language_batch(vocabulary: int = 37) -> dict[str, Tensor]:
    tokens = torch.randint(0, vocabulary, (2, 12))
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def by_its_own_loss(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: model(**batch).loss


def llama(attention: str = "sdpa") -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=37, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention,
    )  # fmt: skip
    model, batch = LlamaForCausalLM(settings), language_batch()

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(**batch).logits.flatten(0, -2), batch["input_ids"].flatten())

    return Case(model, loss_fn, batch)


def llama_with_labels() -> Case:
    model, _, batch = llama()
    return Case(model, by_its_own_loss(model), {**batch, "labels": batch["input_ids"]})


def gpt2_with_labels() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=WIDTH, n_layer=3, n_head=2, n_positions=16))
    batch = language_batch()
    return Case(model, by_its_own_loss(model), {**batch, "labels": batch["input_ids"]})


def bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    settings = BertConfig(
        vocab_size=37, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_labels=CLASSES,
    )  # fmt: skip
    model = BertForSequenceClassification(settings)
    return Case(model, by_its_own_loss(model), {**language_batch(), "labels": torch.tensor([1, 3])})


class Graphs(nn.Module):
    def __init__(self, *convs: nn.Module) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.elu(conv(F.dropout(x, 0.2, self.training), edges))
        return self.convs[-1](x, edges)


def on_a_graph(kind: str) -> Case:
    from torch_geometric.nn import GATConv, GCNConv

    if kind == "GAT":
        model = Graphs(GATConv(WIDTH, 8, 2, dropout=0.2), GATConv(16, 8, 2), GATConv(16, CLASSES))
    else:
        model = Graphs(GCNConv(WIDTH, 16), GCNConv(16, 16), GCNConv(16, CLASSES))
    x, targets = rows_of()
    edges = torch.randint(24, (2, 80))
    return Case(model, lambda batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]), (x, edges, targets))


CASES: dict[str, Callable[[], Case]] = {
    "gpt": small_gpt,
    "gpt with dropout": lambda: small_gpt(dropout=0.1),
    "checkpoints": lambda: checkpointed(partial(plain, reentrant=False)),
    "reentrant checkpoints": lambda: checkpointed(partial(plain, reentrant=True)),
    "selective checkpoints": lambda: checkpointed(selective),
    "checkpoints from the batch on": lambda: on_rows(WithoutStem(*layers())),
    "checkpointed closures": lambda: checkpointed(closure),
    "checkpointed segments": in_segments,
    "checkpoints inside of blocks": lambda: with_inner_checkpoints(partial(Wrapped, reentrant=False)),
    "reentrant checkpoints inside of blocks": lambda: with_inner_checkpoints(partial(Wrapped, reentrant=True)),
    "two checkpoints in a block": lambda: with_inner_checkpoints(Halves),
    "unet": unet,
    "encoder and decoder": encoder_decoder,
    "called several times": lambda: on_rows(CalledTwice(*layers(2, dropout=0.1))),
    "stages": lambda: on_rows(Stages()),
    "expanded": lambda: on_rows(Expanded(*layers(3))),
    "skipped by a branch": lambda: on_rows(Branch(*layers(3))),
    "powers": lambda: on_rows(Powers(*(Squared() for _ in range(3)))),
    "a state that nothing reads": lambda: on_rows(Carrying(*(WithState() for _ in range(3)))),
    "structures": lambda: on_rows(Wired()),
    "model outputs": lambda: on_rows(ModelOutputs()),
    "tables and masks": lambda: on_rows(RotaryModel()),
    "buffers": lambda: on_rows(Stack(*(Counting() for _ in range(3)))),
    "spectral and batch norm": lambda: on_rows(Stack(*(Normed() for _ in range(3)))),
    "random numbers of Python and NumPy": lambda: on_rows(Stack(*(LayerDrop(dropout=0.1) for _ in range(4)))),
    "autocast": under_autocast,
    "tied": tied,
    "lora": with_lora,
    "frozen": frozen,
    "changed after a block": lambda: on_rows(ChangedAfter(*layers(3))),
    "changes its input": lambda: on_rows(Stack(Layer(), ChangesInput(), Layer())),
    "llama": llama,
    "llama with eager attention": lambda: llama("eager"),
    "llama with labels": llama_with_labels,
    "gpt2 with labels": gpt2_with_labels,
    "bert with labels": bert,
    "GAT": lambda: on_a_graph("GAT"),
    "GCN": lambda: on_a_graph("GCN"),
}

OPAQUE: dict[str, Callable[[], nn.Module]] = OrderedDict(LSTM=Recurrent, EmbeddingBag=Bags, Function=WithFunction)


def made(name: str) -> Case:
    """A case with the same weights and batch at every call."""
    torch.manual_seed(0)
    return CASES[name]()


def made_opaque(name: str) -> Case:
    """Blocks of which the middle one cannot be differentiated twice."""
    torch.manual_seed(0)
    return beside_layers(OPAQUE[name]())
