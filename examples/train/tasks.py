"""The tasks: for each a model, examples as tensors, and the forward pass of a batch of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import data
from .config import RunConfig, UsageError
from .models import GraphAttentionNetwork, GraphNetwork, GraphSage, LanguageModel, ResNet, TextClassifier

Batch = dict[str, Tensor]
SPLIT_SEED = 1234  # the split into training and test examples is part of the task: the same for every seed of a run
TEST_BATCH_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data. Row i of every tensor in `train` or `test` is example i."""

    model: nn.Module
    train: Batch
    test: Batch
    logits: Callable[[nn.Module, Batch], Tensor]
    """(model, wrapped or not; batch) -> [batch, classes], or [batch, classes, tokens] with a label for each token"""


def build_task(config: RunConfig, device: torch.device) -> Task:
    """Read the data and build the model on `device`. Raises `UsageError` if there are too few examples."""
    builders = {"text": _text_task, "image": _image_task, "graph": _graph_task, "language": _language_task}
    return builders[config.task](config, device)


def batch_rows(step: int, *, examples: int, batch_size: int, seed: int, rank: int, world_size: int) -> Tensor:
    """Indices of one rank's share of the batch of `step`, [batch_size / world_size] int64.

    Each epoch is a new permutation, without its incomplete last batch. The shares are disjoint, and together they are
    the same batch for every world size.
    """
    steps_per_epoch = examples // batch_size
    epoch, position = divmod(step, steps_per_epoch)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 100_003 + epoch))
    return order[position * batch_size : (position + 1) * batch_size][rank::world_size]


def test_batches(test: Batch, rank: int, world_size: int) -> Iterator[Batch]:
    """One rank's share of the test examples, in batches."""
    rows = torch.arange(len(test["labels"]))[rank::world_size]
    for part in rows.split(TEST_BATCH_SIZE):
        yield select(test, part)


def select(examples: Batch, rows: Tensor) -> Batch:
    """These rows of every tensor."""
    rows = rows.to(examples["labels"].device)
    return {name: tensor[rows] for name, tensor in examples.items()}


def _split(examples: Batch, config: RunConfig) -> tuple[Batch, Batch]:
    """Training and test examples, disjoint, drawn with a fixed seed."""
    available, wanted = len(examples["labels"]), config.train_examples + config.test_examples
    if wanted > available:
        raise UsageError(
            f"train_examples + test_examples is {wanted}, the {config.task} data hold {available}: lower one of them"
        )
    order = torch.randperm(available, generator=torch.Generator().manual_seed(SPLIT_SEED))
    return select(examples, order[: config.train_examples]), select(examples, order[config.train_examples : wanted])


def _text_task(config: RunConfig, device: torch.device) -> Task:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    texts, labels = data.read_reviews(data.CACHE / "reviews.txt")
    tokenizer = AutoTokenizer.from_pretrained(data.CACHE / data.MODEL_FOLDER)
    length = {"padding": "max_length", "truncation": True, "max_length": config.sequence_length}
    tokens = tokenizer(texts, return_tensors="pt", **length)
    examples = {name: tokens[name].to(device) for name in ("input_ids", "attention_mask")}
    train, test = _split({**examples, "labels": labels.to(device)}, config)
    return Task(
        model=TextClassifier(data.CACHE / data.MODEL_FOLDER, classes=2, dropout=config.dropout).to(device),
        train=train,
        test=test,
        logits=lambda model, batch: model(batch["input_ids"], batch["attention_mask"]),
    )


def _image_task(config: RunConfig, device: torch.device) -> Task:
    images, labels = data.read_digits(data.CACHE / "mnist_5k.csv.gz")
    train, test = _split({"images": images.to(device), "labels": labels.to(device)}, config)
    return Task(
        model=ResNet(1, config.channels, config.blocks_per_stage, classes=10, dropout=config.dropout).to(device),
        train=train,
        test=test,
        logits=lambda model, batch: model(batch["images"]),
    )


def _graph_task(config: RunConfig, device: torch.device) -> Task:
    features, labels, edges = data.read_cora(data.CACHE / "cora.content", data.CACHE / "cora.cites")
    features, edges = features.to(device), edges.to(device)
    train, test = _class_balanced_split(labels, config)
    sizes = (features.shape[1], config.hidden_size, config.layers, int(labels.max()) + 1)
    networks: dict[str, Callable[[], nn.Module]] = {
        "gcn": lambda: GraphNetwork(*sizes, dropout=config.dropout),
        "sage": lambda: GraphSage(*sizes, dropout=config.dropout),
        "gat": lambda: GraphAttentionNetwork(*sizes, heads=config.heads, dropout=config.dropout),
    }
    model = networks[config.network]()
    return Task(
        model=model.to(device),
        train={"nodes": train.to(device), "labels": labels[train].to(device)},
        test={"nodes": test.to(device), "labels": labels[test].to(device)},
        logits=lambda model, batch: model(features, edges, batch["nodes"]),
    )


def _language_task(config: RunConfig, device: torch.device) -> Task:
    characters, alphabet = data.read_characters(data.CACHE / "reviews.txt")
    windows = characters.unfold(0, config.sequence_length + 1, config.sequence_length).to(device)
    train, test = _split({"tokens": windows[:, :-1], "labels": windows[:, 1:]}, config)
    sizes = (len(alphabet), config.sequence_length, config.hidden_size, config.layers, config.heads)
    return Task(
        model=LanguageModel(*sizes, dropout=config.dropout).to(device),
        train=train,
        test=test,
        logits=lambda model, batch: model(batch["tokens"]).transpose(1, 2),
    )


def _class_balanced_split(labels: Tensor, config: RunConfig) -> tuple[Tensor, Tensor]:
    """Training nodes, the same number of each class, and test nodes (the split of Yang et al., 2016)."""
    classes = int(labels.max()) + 1
    if config.train_examples % classes:
        raise UsageError(f"train_examples is {config.train_examples}: give a multiple of the {classes} classes")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    each = config.train_examples // classes
    train = torch.cat([order[labels[order] == label][:each] for label in range(classes)])
    rest = order[~torch.isin(order, train)]
    if len(train) < config.train_examples or len(rest) < config.test_examples:
        raise UsageError(
            f"train_examples {config.train_examples} and test_examples {config.test_examples} are more than "
            f"the {len(labels)} nodes hold ({each} of each class for training): lower one of them"
        )
    return train, rest[: config.test_examples]
