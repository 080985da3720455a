"""Models to measure steps on: GPTs, BERT-large, ResNet-50 and Swin-T, and small ones of the same build for a CPU.

The GPT is written here; the others are those of transformers, with random weights. Weights are bfloat16 (small ones
float32), images channels_last. Every model takes one tensor and returns logits, and lists the containers of its blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Blocks = list[nn.ModuleList | nn.Sequential]


class Block(nn.Module):
    """Attention and MLP with the norms in front (Xiong et al., 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [batch, length] -> logits [batch, length, vocabulary], which share their matrix with the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def block_containers(self) -> Blocks:
        """What holds the blocks."""
        return [self.blocks]


class Classifier(nn.Module):
    """A classifier of transformers: its one input -> logits [batch, classes]."""

    def __init__(self, model: nn.Module, containers: Callable[[Any], Sequence[nn.Module]]) -> None:
        super().__init__()
        self.model = model
        self._containers = containers

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.model(inputs).logits

    def block_containers(self) -> Blocks:
        """What holds the blocks."""
        return list(self._containers(self.model))


def bert(attention: str, **sizes: int) -> Classifier:
    """BERT with a classifier on top, as GACT measured it; attention: sdpa (fused) or eager (materialised)."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(attn_implementation=attention, **sizes)
    return Classifier(BertForSequenceClassification(config), lambda model: [model.bert.encoder.layer])


def resnet(**sizes: Any) -> Classifier:
    """A ResNet of bottleneck blocks (He et al., 2016); transformers' defaults are ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))
    return Classifier(model, lambda model: [stage.layers for stage in model.resnet.encoder.stages])


def swin(**sizes: Any) -> Classifier:
    """A Swin transformer (Liu et al., 2021); transformers' defaults are Swin-T."""
    from transformers import SwinConfig, SwinForImageClassification

    model = SwinForImageClassification(SwinConfig(num_labels=1000, **sizes))
    return Classifier(model, lambda model: [stage.blocks for stage in model.swin.encoder.layers])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with the inputs of a step."""

    make: Callable[..., nn.Module]
    inputs: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    """(samples, device) -> what the model takes, and the classes that it should give"""
    batch: int
    """samples of a step whose time is measured"""
    attentions: tuple[str, ...] = ("sdpa",)
    """values that `make` takes as attention, the first where nothing else is said"""
    calibration_samples: int = 8
    """samples that an adaptation differentiates twice: memory that must be there"""
    dtype: torch.dtype = torch.bfloat16

    def model(self, device: torch.device, attention: str = "") -> nn.Module:
        """The model in training mode on the device, its weights drawn there."""
        torch.manual_seed(0)
        options = {"attention": attention or self.attentions[0]} if len(self.attentions) > 1 else {}
        with device:
            model = self.make(**options)
        model = model.to(device=device, dtype=self.dtype, memory_format=torch.channels_last)
        return model.train()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy over all predictions."""
    inputs, classes = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), classes.flatten())


def next_tokens(vocabulary: int, length: int, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, and each one's successor."""
    tokens = torch.randint(vocabulary, (samples, length + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sentences(vocabulary: int, length: int, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, and a class for each sentence."""
    tokens = torch.randint(vocabulary, (samples, length), device=device)
    return tokens, torch.randint(2, (samples,), device=device)


def images(size: int, dtype: torch.dtype, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images, and a class for each."""
    pixels = torch.randn(samples, 3, size, size, device=device, dtype=dtype)
    return pixels.to(memory_format=torch.channels_last), torch.randint(1000, (samples,), device=device)


def _gpt(batch: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Shape:
    inputs = partial(next_tokens, sizes["vocabulary"], sizes["length"])
    return Shape(make=partial(GPT, **sizes), inputs=inputs, batch=batch, dtype=dtype, calibration_samples=1)


def _bert(batch: int, length: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Shape:
    make = partial(bert, max_position_embeddings=length, **sizes)
    inputs = partial(sentences, sizes["vocab_size"], length)
    attentions = ("sdpa", "eager")
    return Shape(make=make, inputs=inputs, batch=batch, attentions=attentions, dtype=dtype, calibration_samples=2)


def _images(make: Callable[..., nn.Module], batch: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Shape:
    return Shape(make=make, inputs=partial(images, size, dtype), batch=batch, dtype=dtype)


SHAPES: dict[str, Shape] = {
    "gpt-1024": _gpt(16, vocabulary=50304, length=1024, width=1024, layers=24, heads=16),
    "gpt-2048": _gpt(4, vocabulary=50304, length=2048, width=2048, layers=24, heads=16),
    "bert-large": _bert(
        32, 512, vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096,
    ),
    "resnet-50": _images(resnet, 128, 224),
    "swin-t": _images(swin, 128, 224),
}  # fmt: skip
"""What is measured on a GPU, by name."""

_SMALL_SWIN = {"image_size": 56, "embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2)}
_SMALL_RESNET = {"embedding_size": 16, "hidden_sizes": (32, 64), "depths": (1, 1)}

SMALL_SHAPES: dict[str, Shape] = {
    "gpt-1024": _gpt(8, torch.float32, vocabulary=64, length=32, width=64, layers=2, heads=2),
    "gpt-2048": _gpt(8, torch.float32, vocabulary=64, length=64, width=128, layers=2, heads=2),
    "bert-large": _bert(
        8, 32, torch.float32, vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=256,
    ),
    "resnet-50": _images(partial(resnet, **_SMALL_RESNET), 8, 32, torch.float32),
    "swin-t": _images(partial(swin, **_SMALL_SWIN), 8, 56, torch.float32),
}  # fmt: skip
"""The same by the same code, small enough for a CPU: whether the script works, not how fast anything is."""
