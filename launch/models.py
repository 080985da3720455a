"""The three models of the example runs, written as a user would write them: nothing in them knows of compression."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class TextClassifier(nn.Module):
    """A pretrained encoder, the mean over its token vectors, and a linear layer; the word vectors stay as they are.

    Half of the encoder's 22.6 million parameters are word vectors, most of which a few thousand examples never use.
    """

    def __init__(self, folder: Path, classes: int, dropout: float) -> None:
        """Load the encoder from `folder`; `dropout` replaces every dropout probability of the encoder."""
        super().__init__()
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        self.encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False, **rates)
        self.encoder.embeddings.word_embeddings.weight.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(self.encoder.config.hidden_size, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token numbers and mask, [batch, tokens] each -> logits, [batch, classes]."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        return self.head(self.dropout(mean))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut (He et al., 2016, Figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, inputs, height, width] -> [batch, outputs, height / stride, width / stride]."""
        hidden = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class ResNet(nn.Module):
    """The small ResNet of He et al., 2016, section 4.2: three stages, the width doubles and the size halves between."""

    def __init__(self, image_channels: int, channels: int, blocks_per_stage: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(image_channels, channels, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(channels)
        blocks = []
        width = channels
        for stage in range(3):
            outputs = channels * 2**stage
            for block in range(blocks_per_stage):
                blocks.append(ResidualBlock(width, outputs, stride=2 if stage > 0 and block == 0 else 1))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """[batch, image_channels, height, width] -> logits, [batch, classes]."""
        hidden = self.blocks(functional.relu(self.stem_norm(self.stem(images))))
        return self.head(self.dropout(hidden.mean(dim=(2, 3))))


class GraphNetwork(nn.Module):
    """A graph convolutional network (Kipf and Welling, 2017, equation 2), from PyTorch Geometric's GCNConv."""

    def __init__(self, words: int, hidden_size: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        widths = [words, *[hidden_size] * (layers - 1), classes]
        # The graph never changes, so its normalisation is worked out once.
        self.layers = nn.ModuleList(GCNConv(a, b, cached=True) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:
        """Features, [all nodes, words], edges, [2, edges], and the nodes asked for, [n] -> logits, [n, classes]."""
        hidden = features
        for number, layer in enumerate(self.layers):
            hidden = functional.relu(hidden) if number else hidden
            hidden = layer(self.dropout(hidden), edges)
        return hidden[nodes]


def digest_of(model: nn.Module) -> str:
    """SHA-256 over the names and the bytes of all parameters and buffers, in the order of state_dict()."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
