"""The jobs whose peak memory is measured: a model, its loss, the batch of every step, and what its blocks are.

Each is written as its authors would write it and knows nothing of compression. The demo's models train on the demo's
data, all others on random data of the sizes given. Each also has small sizes, for tests of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.train import data
from examples.train.config import load_config
from examples.train.models import LanguageModel
from examples.train.tasks import batch_rows, build_task, select


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, on the same batch in every step."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    blocks: list[nn.Module]
    """what a checkpoint recomputes, and what FSDP2 shards, one by one"""
    pretrained: Any = None
    """the part that is a model of transformers, which has its own way to checkpoint its blocks"""


_ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def _demo(config: str, batch_size: int) -> Any:
    """The model of a config of configs/train/; the loss and the first batch."""
    settings = load_config(config, [f"batch_size={batch_size}"])
    data.fetch(settings.task)
    task = build_task(settings, torch.device("cpu"))
    rows = batch_rows(0, examples=settings.train_examples, batch_size=batch_size, seed=0, rank=0, world_size=1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(task.logits(model, batch), batch["labels"])

    return task.model, {"loss": loss, "batch": select(task.train, rows)}


def text(batch_size: int = 32) -> Job:
    """The demo's text model, a pretrained MiniLM on movie reviews; 32 are one rank's share of the demo's batch."""
    model, rest = _demo("text", batch_size)
    return Job(model=model, optimizer=_ADAMW, blocks=[*model.encoder.encoder.layer], pretrained=model.encoder, **rest)


def image(batch_size: int = 256) -> Job:
    """The demo's image model, a small ResNet on handwritten digits, with four times the batch."""
    model, rest = _demo("image", batch_size)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=5e-4)
    return Job(model=model, optimizer=optimizer, blocks=[*model.blocks], **rest)


class GAT(nn.Module):
    """Graph attention as in the example of PyTorch Geometric (Velickovic et al., 2018)."""

    def __init__(self, inputs: int, hidden: int, classes: int, heads: int, dropout: float) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.dropout = dropout
        self.conv1 = GATConv(inputs, hidden, heads, dropout=dropout)
        self.conv2 = GATConv(hidden * heads, classes, heads=1, concat=False, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Features [nodes, inputs] and edges [2, edges] -> logits [nodes, classes]."""
        x = functional.dropout(x, p=self.dropout, training=self.training)
        x = functional.elu(self.conv1(x, edge_index))
        x = functional.dropout(x, p=self.dropout, training=self.training)
        return self.conv2(x, edge_index)


def _random_graph(nodes: int, features: int, edges: int, classes: int) -> Any:
    """Undirected, with a tenth of the features of a node above zero; 20 nodes of each class are for training."""
    from torch_geometric.data import Data

    one_way = torch.randint(nodes, (2, edges // 2))
    words = torch.rand(nodes, features) * (torch.rand(nodes, features) < 0.1)
    return Data(
        x=words / words.sum(dim=1, keepdim=True).clamp(min=1e-6),
        edge_index=torch.cat([one_way, one_way.flip(0)], dim=1),
        y=torch.randint(classes, (nodes,)),
        train_mask=torch.arange(nodes) < 20 * classes,
    )


def _graph_loss(model: nn.Module, graph: Any) -> Tensor:
    logits = model(graph.x, graph.edge_index)
    return functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])


def gat(nodes: int = 19_717, features: int = 500, edges: int = 88_648) -> Job:
    """Two layers of graph attention, 8 heads of 8, on a random graph of PubMed's sizes: one batch of all nodes."""
    model = GAT(features, 8, 3, 8, 0.6)
    return Job(
        model=model,
        loss=_graph_loss,
        batch=_random_graph(nodes, features, edges, 3),
        optimizer=partial(torch.optim.Adam, lr=0.005, weight_decay=5e-4),
        blocks=[model.conv1, model.conv2],
    )


class UNet(nn.Module):
    """The U-Net of Ronneberger et al., 2015, with padding and BatchNorm: long skips join its two halves."""

    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(_two_convolutions(a, b) for a, b in pairwise([3, *widths]))
        upwards = [*pairwise(reversed(widths))]
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(a, b, kernel_size=2, stride=2) for a, b in upwards)
        self.up = nn.ModuleList(_two_convolutions(2 * b, b) for _, b in upwards)
        self.head = nn.Conv2d(channels, 2, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, height, width] -> logits [batch, 2, height, width]."""
        hidden, skips = images, []
        for level, block in enumerate(self.down):
            hidden = block(functional.max_pool2d(hidden, 2) if level else hidden)
            skips.append(hidden)
        for enlarge, block, skip in zip(self.enlarge, self.up, reversed(skips[:-1]), strict=True):
            hidden = block(torch.cat([skip, enlarge(hidden)], dim=1))
        return self.head(hidden)


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return functional.cross_entropy(model(inputs), classes)


def unet(batch_size: int = 16, size: int = 80, channels: int = 32, levels: int = 4) -> Job:
    """A U-Net for segmentation into two classes."""
    model = UNet(channels, levels)
    pixels, classes = torch.randn(batch_size, 3, size, size), torch.randint(2, (batch_size, size, size))
    return Job(
        model=model,
        loss=_cross_entropy,
        batch=(pixels, classes),
        optimizer=_ADAMW,
        blocks=[*model.down, *model.up],
    )


def vit(batch_size: int = 32, layers: int = 12, width: int = 192) -> Job:
    """The ViT-Tiny of Touvron et al., 2021, by transformers, on images of 64 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=4 * width,
        image_size=32, patch_size=4, num_labels=100,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    pixels, classes = torch.randn(batch_size, 3, 32, 32), torch.randint(100, (batch_size,))
    return Job(
        model=model,
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]).logits, batch[1]),
        batch=(pixels, classes),
        optimizer=_ADAMW,
        blocks=_layers_of(model),
        pretrained=model,
    )


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a model of transformers, which are all that it can checkpoint."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def long(length: int = 2048, layers: int = 6, width: int = 256) -> Job:
    """A GPT on one long sequence: a batch that has no examples to measure on a part of."""
    model = LanguageModel(1024, length, width, layers, heads=4, dropout=0.0)
    tokens = torch.randint(1024, (1, length + 1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return Job(
        model=model,
        loss=loss,
        batch=(tokens[:, :-1], tokens[:, 1:]),
        optimizer=_ADAMW,
        blocks=[*model.blocks],
    )


def llama(batch_size: int = 4, length: int = 128, words: int = 32_000, layers: int = 4, width: int = 256) -> Job:
    """A Llama by transformers with a large vocabulary. The loss is the model's own, which it returns beside logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokens = torch.randint(words, (batch_size, length))
    return Job(
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch={"input_ids": tokens, "labels": tokens},
        optimizer=_ADAMW,
        blocks=[*model.model.layers],
        pretrained=model,
    )


def llama_deep(batch_size: int = 8, length: int = 512, words: int = 64, layers: int = 24, width: int = 128) -> Job:
    """A Llama of many narrow blocks and few words: what a checkpoint keeps is an input for each block."""
    job = llama(batch_size, length, words, layers, width)
    return replace(job, optimizer=partial(torch.optim.SGD, lr=0.01))


def llama_chunked(**sizes: int) -> Job:
    """The same with torch's chunked loss, which makes the logits of some tokens at a time and keeps none."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden = model.model(batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
        targets = batch["labels"][:, 1:].flatten()
        return functional.linear_cross_entropy(hidden, model.lm_head.weight, targets, options=chunked)

    chunked = nn.LinearCrossEntropyOptions()  # since torch 2.13
    return replace(llama(**sizes), loss=loss)


_ALL = text, image, gat, unet, vit, long, llama, llama_chunked, llama_deep
JOBS: dict[str, Callable[..., Job]] = {job.__name__: job for job in _ALL}
UNSHARDED = frozenset({"gat", "llama_chunked", "llama_deep"})
"""jobs that nobody would run with FSDP2 (two small layers and one graph), that cannot (the chunked loss reads the
head's weight outside of the head, where it is sharded), or whose steps are long"""

SIZES_ON_TWO_RANKS: dict[str, dict[str, int]] = {
    "text": {"batch_size": 16},
    "image": {"batch_size": 128},
    "unet": {"batch_size": 8},
    "vit": {"batch_size": 16},
    "llama": {"batch_size": 2},
}
"""half of the batch for each rank, where it has more than one example"""

SMALL_SIZES: dict[str, dict[str, int]] = {
    "text": {"batch_size": 2},
    "image": {"batch_size": 2},
    "gat": {"nodes": 64, "features": 32, "edges": 128},
    "unet": {"batch_size": 2, "size": 16, "channels": 8, "levels": 3},
    "vit": {"batch_size": 2, "layers": 2, "width": 48},
    "long": {"length": 64, "layers": 2, "width": 32},
    "llama": {"batch_size": 2, "length": 16, "words": 256, "layers": 2, "width": 32},
    "llama_chunked": {"batch_size": 2, "length": 16, "words": 256, "layers": 2, "width": 32},
    "llama_deep": {"batch_size": 4, "length": 32, "layers": 4, "width": 32},
}
