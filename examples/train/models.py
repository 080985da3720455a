"""The models of the example runs, as a user would write them: they know nothing of compression."""

from __future__ import annotations

import hashlib
import os
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class TextClassifier(nn.Module):
    """A pretrained encoder, the mean over its token vectors, and a linear layer. The word embeddings are frozen.

    Half of the encoder's 22.6 million parameters are word embeddings, and a few thousand examples use few of them.
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


class GraphSage(nn.Module):
    """GraphSAGE with the mean over all neighbours (Hamilton et al., 2017, Algorithm 1), by sparse products."""

    def __init__(self, words: int, hidden_size: int, layers: int, classes: int, dropout: float) -> None:
        super().__init__()
        widths = [words, *[hidden_size] * (layers - 1), classes]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.neighbours = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:
        """Features, [all nodes, words], edges, [2, edges], and the nodes asked for, [n] -> logits, [n, classes]."""
        hidden, mean = features, _mean_over_neighbours(edges, len(features))
        for number, (own, neighbours) in enumerate(zip(self.own, self.neighbours, strict=True)):
            hidden = functional.relu(hidden) if number else hidden
            hidden = self.dropout(hidden)
            # a mean of products is the product of the mean, and narrower
            hidden = own(hidden) + torch.sparse.mm(mean, neighbours(hidden))
        return hidden[nodes]


def _mean_over_neighbours(edges: Tensor, nodes: int) -> Tensor:
    """The sparse matrix, [nodes, nodes], whose row i averages over the sources of the edges to node i."""
    sources, targets = edges
    weights = 1 / torch.bincount(targets, minlength=nodes)[targets].float()
    return torch.sparse_coo_tensor(
        torch.stack([targets, sources]), weights, (nodes, nodes), check_invariants=False
    ).coalesce()


class GraphAttentionLayer(nn.Module):
    """Attention over a node's neighbours and itself (Velickovic et al., 2018, equations 1 to 5), heads side by side."""

    def __init__(self, inputs: int, outputs: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(inputs, heads * outputs, bias=False)
        nn.init.xavier_uniform_(self.project.weight)
        # the two halves of the vector a of equation 3
        self.source = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, outputs)))
        self.target = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, outputs)))
        self.bias = nn.Parameter(torch.zeros(heads * outputs))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, edges: Tensor) -> Tensor:
        """[nodes, inputs] and edges with self-loops, [2, edges] -> [nodes, heads * outputs]."""
        sources, targets = edges
        values = self.project(self.dropout(hidden)).unflatten(1, self.source.shape)
        scores = (values * self.source).sum(-1)[sources] + (values * self.target).sum(-1)[targets]
        weights = self.dropout(_softmax_over_edges(functional.leaky_relu(scores, 0.2), targets, len(hidden)))
        messages = weights.unsqueeze(-1) * self.dropout(values)[sources]
        return torch.zeros_like(values).index_add(0, targets, messages).flatten(1) + self.bias


def _softmax_over_edges(scores: Tensor, targets: Tensor, nodes: int) -> Tensor:
    """Scores, [edges, heads], normalised over all edges that have the same target."""
    rows = targets.unsqueeze(1).expand_as(scores)
    lowest = scores.new_full((nodes, scores.shape[1]), -torch.inf)
    highest = lowest.scatter_reduce(0, rows, scores.detach(), "amax")
    weights = (scores - highest[targets]).exp()
    return weights / torch.zeros_like(lowest).index_add(0, targets, weights)[targets]


class GraphAttentionNetwork(nn.Module):
    """Graph attention layers (Velickovic et al., 2018, section 3.3): ELU between them, one head in the last."""

    def __init__(self, words: int, hidden_size: int, layers: int, classes: int, heads: int, dropout: float) -> None:
        """hidden_size: of all heads together."""
        super().__init__()
        widths = [words, *[hidden_size] * (layers - 1)]
        hidden = (GraphAttentionLayer(a, b // heads, heads, dropout) for a, b in pairwise(widths))
        self.layers = nn.ModuleList([*hidden, GraphAttentionLayer(widths[-1], classes, 1, dropout)])

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:
        """Features, [all nodes, words], edges, [2, edges], and the nodes asked for, [n] -> logits, [n, classes]."""
        itself = torch.arange(len(features), device=edges.device).expand(2, -1)
        edges = torch.cat([edges, itself], dim=1)
        hidden = features
        for number, layer in enumerate(self.layers):
            hidden = layer(functional.elu(hidden) if number else hidden, edges)
        return hidden[nodes]


class TransformerBlock(nn.Module):
    """Causal attention and an MLP with the norms in front (Radford et al., 2019, section 2.3)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, tokens, width] -> the same."""
        split = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm2(hidden)))))


class LanguageModel(nn.Module):
    """A small GPT with learned positions (Radford et al., 2019)."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] -> logits of the next token at every position, [batch, tokens, vocabulary]."""
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.dropout(self.tokens(tokens) + positions))))


def digest_of(model: nn.Module) -> str:
    """SHA-256 over the names and the bytes of all parameters and buffers, in the order of state_dict()."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
