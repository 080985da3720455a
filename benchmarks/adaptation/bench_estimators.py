"""Every estimator of sensitivity against rounding each tensor alone, on a small model of each kind.

    python -m benchmarks.adaptation.bench_estimators --json benchmarks/results/estimators.json

For each saved tensor the truth is the mean squared distance between the gradient with that tensor alone rounded to
`--bits` bits and the exact one, over `--draws` draws. Next to it: one pass (`--probes` random directions, taken at 8
bits), perturbation (the mean of `--repeats`, each the change between two roundings to 4 bits, carried to the width by
the rounding), and the layer-wise bounds of AC-GC where they exist (acgc_bounds.py). Of each the ratio to the truth:
median over tensors, and the tensor that is worst. Takes about a minute.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.adaptation.acgc_bounds import LayerBounds
from examples.train.models import GraphNetwork, LanguageModel, ResNet
from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks
from gact_dist.hooks.handles import Recorded
from gact_dist.sensitivity.isolation import untouched
from gact_dist.sensitivity.measuring_mode import MeasuringMode
from gact_dist.sensitivity.one_pass import measure

NODES, EDGES, WORDS, CLASSES = 400, 2000, 64, 7
VOCABULARY, LENGTH = 256, 32
BOUND = "white-box"


@dataclass(frozen=True)
class Job:
    """A model and the loss of one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]


class TwoConvolutions(nn.Module):
    """Two layers of PyTorch Geometric."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, features: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:
        """Features, [all nodes, words], edges, [2, edges], and the nodes asked for, [n] -> logits, [n, classes]."""
        return self.second(F.elu(self.first(features, edges)), edges)[nodes]


def images() -> Job:
    """Convolutions, batch norm, ReLU, residuals."""
    model = ResNet(image_channels=1, channels=8, blocks_per_stage=1, classes=10, dropout=0.0)
    batch, labels = torch.randn(16, 1, 16, 16), torch.randint(0, 10, (16,))
    return Job(model, lambda: F.cross_entropy(model(batch), labels))


def language() -> Job:
    """A transformer block: layer norm, fused attention, GELU."""
    model = LanguageModel(VOCABULARY, LENGTH, width=128, layers=1, heads=4, dropout=0.0)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1))
    return Job(model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))


def text() -> Job:
    """A BERT of transformers with an attention mask, its weights untrained."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(**sizes, **no_dropout, intermediate_size=128, num_labels=CLASSES))
    tokens, labels = torch.randint(0, VOCABULARY, (8, LENGTH)), torch.randint(0, CLASSES, (8,))
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH, (8, 1))).long()
    return Job(model, lambda: model(input_ids=tokens, attention_mask=mask, labels=labels).loss)


def _on_graph(model: nn.Module) -> Job:
    features, nodes = torch.randn(NODES, WORDS), torch.arange(NODES // 2)
    edges, labels = torch.randint(0, NODES, (2, EDGES)), torch.randint(0, CLASSES, (NODES // 2,))
    return Job(model, lambda: F.cross_entropy(model(features, edges, nodes), labels))


def graph() -> Job:
    """A graph convolutional network."""
    return _on_graph(GraphNetwork(WORDS, 32, 3, CLASSES, 0.0))


def graph_sage() -> Job:
    """GraphSAGE with the mean of the neighbours (Hamilton et al., 2017)."""
    from torch_geometric.nn import SAGEConv

    return _on_graph(TwoConvolutions(SAGEConv(WORDS, 32), SAGEConv(32, CLASSES)))


def graph_attention() -> Job:
    """Graph attention (Velickovic et al., 2018)."""
    from torch_geometric.nn import GATConv

    return _on_graph(TwoConvolutions(GATConv(WORDS, 16, heads=4), GATConv(64, CLASSES)))


KINDS: dict[str, Callable[[], Job]] = {
    "CNN": images,
    "transformer": language,
    "text encoder": text,
    "GCN": graph,
    "GraphSAGE": graph_sage,
    "GAT": graph_attention,
}


def direct(job: Job, bits: int, draws: int) -> tuple[dict[str, float], dict[str, float]]:
    """({name: squared error of the gradient with that tensor alone rounded}, {name: the layer-wise bound of it})."""
    hooks = SavedTensorHooks(job.model, Config(min_numel=0), 0)
    truth, bounds = {}, {}
    with untouched(job.model), LayerBounds(job.model) as layers:
        with hooks.recording(MeasuringMode()) as records:
            loss = job.loss()
        exact = gradient(job.model, loss)
        compressible = [record for record in records if record.compressible]
        bounds = layers.bounds(loss, compressible, lambda record: rounded(record, bits, 0) - record.tensor)
        for record in compressible:
            total = 0.0
            for draw in range(draws):
                record.replacement = rounded(record, bits, draw)
                total += float((gradient(job.model, loss) - exact).square().sum())
            record.replacement = None
            truth[record.name] = total / draws
    hooks.close()
    return truth, bounds


def rounded(record: Recorded, bits: int, seed: int) -> Tensor:
    """The tensor as it comes back from a width."""
    return codec.unpack(codec.pack(record.tensor, bits=bits, seed=seed))


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """Of all parameters, flat."""
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in found])


def estimated(job: Job, estimator: str, bits: int, repeats: int, **options: Any) -> dict[str, float]:
    """{name: variance at a width}, the mean of some measurements."""
    found = []
    for repeat in range(repeats):
        hooks = SavedTensorHooks(job.model, Config(min_numel=0, bits=8), 0)
        found.append(measure(hooks, job.model, job.loss, seed=1000 * repeat + 1, estimator=estimator, **options))
        hooks.close()
    return {
        items[0].name: statistics.fmean(float(item.variance[bits - 1]) for item in items)
        for items in zip(*found, strict=True)
    }


def rows(kind: str, bits: int, draws: int, probes: int, repeats: int) -> Iterator[dict[str, Any]]:
    """For each estimator the ratios to the truth over the tensors of a model."""
    torch.manual_seed(0)
    job = KINDS[kind]()
    truth, bounds = direct(job, bits, draws)
    found = {
        "one-pass": estimated(job, "one-pass", bits, 1, probes=probes),
        "perturbation": estimated(job, "perturbation", bits, repeats),
    }
    if bounds:
        found[BOUND] = bounds
    for estimator, values in found.items():
        if estimator != BOUND and values.keys() != truth.keys():
            raise RuntimeError(f"{estimator} measured {sorted(values)}, expected {sorted(truth)}")
        ratios = {name: value / truth[name] for name, value in values.items() if truth[name] > 0.0}
        worst = max(ratios, key=lambda name: abs(math.log(ratios[name])))
        yield {
            "model": kind, "estimator": estimator, "tensors": len(ratios), "of": len(truth),
            "median_ratio": statistics.median(ratios.values()), "worst_ratio": ratios[worst], "worst": worst,
            "ratios": ratios,
        }  # fmt: skip


def main() -> None:
    """Print a table, and write the results with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--bits", type=int, default=6)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--probes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=32)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("bits", "draws", "probes", "repeats")}
    found = []
    print(f"{'model':12s} {'estimator':13s} {'tensors':>8s} {'median':>8s} {'worst':>9s}  of")
    for kind in options.models:
        for row in rows(kind, **settings):
            found.append(row)
            tensors = f"{row['tensors']}/{row['of']}"
            figures = f"{tensors:>8s} {row['median_ratio']:8.3f} {row['worst_ratio']:9.3f}"
            print(f"{row['model']:12s} {row['estimator']:13s} {figures}  {row['worst']}", flush=True)
    if options.json:
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, **settings, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
