"""The settings of one training run: a TOML file of configs/train/, checked in one place.

A user's mistake raises `UsageError`. Its message is one line: what was given, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
CONFIG_FOLDER = ROOT / "configs" / "train"
TASKS = ("text", "image", "graph", "language")
OPTIMIZERS = ("adamw", "sgd")
NETWORKS = ("gcn", "sage", "gat")


class UsageError(ValueError):
    """A mistake of the person who runs the job. Its message is one line for the terminal."""


def _setting(text: str, default: float | str | None = None, least: float = 1):
    """A field with its description and its smallest value. A field without a default is required."""
    metadata = {"help": text, "least": least}
    return field(metadata=metadata) if default is None else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run trains, on which data and for how long. The keys of a TOML file are these fields."""

    task: str = _setting("text, image, graph or language")
    steps: int = _setting("optimizer steps")
    batch_size: int = _setting("examples in one step, summed over all ranks; graph: training nodes")
    train_examples: int = _setting("examples to train on; graph: training nodes, equally many of each class")
    test_examples: int = _setting("examples to measure accuracy on; never used for training")
    learning_rate: float = _setting("peak learning rate, reached at the end of the warm-up", least=0)
    optimizer: str = _setting("adamw or sgd (momentum 0.9)", "adamw")
    weight_decay: float = _setting("weight decay of the optimizer", 0.0, least=0)
    warmup_fraction: float = _setting("fraction of the steps that are warm-up", 0.1, 0)
    dropout: float = _setting("dropout probability", 0.0, least=0)
    adapt_interval: int = _setting("steps between two adaptations of the bits (adaptive levels)", 50)
    calibration_samples: int = _setting("examples on each rank with which an adaptation measures sensitivity", 8)
    sequence_length: int = _setting("text: tokens in one example, padded or truncated; language: characters", 48)
    channels: int = _setting("image: channels of the first of three stages; each next one has twice as many", 16)
    blocks_per_stage: int = _setting("image: residual blocks in each of the three stages", 2)
    network: str = _setting("graph: gcn, sage or gat", "gcn")
    hidden_size: int = _setting("graph and language: width of the hidden layers, all heads together", 64)
    layers: int = _setting("graph and language: number of layers", 2)
    heads: int = _setting("gat and language: attention heads of a hidden layer; must divide hidden_size", 8)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            _check_type(entry.name, value, str(entry.type))
            if not isinstance(value, str) and not value >= entry.metadata["least"]:
                raise UsageError(f"{entry.name} is {value}: give {entry.metadata['least']} or more")
        _check_choice("task", self.task, TASKS)
        _check_choice("optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("network", self.network, NETWORKS)
        for name in ("dropout", "warmup_fraction"):
            if not getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: give a number from 0 to below 1")
        if self.hidden_size % self.heads:
            raise UsageError(f"heads {self.heads} does not divide hidden_size {self.hidden_size}: change one of them")
        if self.train_examples < self.batch_size:
            raise UsageError(
                f"batch_size {self.batch_size} is more than train_examples {self.train_examples}: lower batch_size"
            )

    def check_world_size(self, world_size: int) -> None:
        """Raise `UsageError` unless each step has the same number of examples for every rank."""
        if world_size > self.batch_size:
            raise UsageError(
                f"{world_size} ranks are more than the {self.batch_size} examples of a batch: "
                f"start at most {self.batch_size} ranks, or raise batch_size"
            )
        if self.batch_size % world_size:
            raise UsageError(
                f"batch_size {self.batch_size} does not split evenly over {world_size} ranks: "
                f"start a number of ranks that divides it, or make batch_size a multiple of {world_size}"
            )


def _check_type(name: str, value: object, type_name: str) -> None:
    accepted = {"str": (str,), "int": (int,), "float": (int, float)}[type_name]
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise UsageError(f"{name} is {value!r} ({type(value).__name__}): give a value of type {type_name}")


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} is {value!r}: give one of {', '.join(choices)}")


def config_names() -> list[str]:
    """The names that `load_config` knows: those of the TOML files in configs/train/."""
    return sorted(path.stem for path in CONFIG_FOLDER.glob("*.toml"))


def load_config(name: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read configs/train/NAME.toml, or the file `name` if it ends in .toml, and apply `key=value` overrides.

    Raises `UsageError` for an unknown name, an unknown key or an invalid value.
    """
    path = Path(name) if name.endswith(".toml") else CONFIG_FOLDER / f"{name}.toml"
    if not path.is_file():
        raise UsageError(f"config {name!r} does not exist: give one of {', '.join(config_names())}, or a .toml file")
    settings = dict(_parse(path.read_text(encoding="utf-8"), str(path)))
    for override in overrides:
        settings.update(_parse_override(override))
    _check_keys(settings, path)
    return RunConfig(**settings)


def _parse(text: str, source: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error


def _parse_override(override: str) -> Mapping[str, Any]:
    """One `key=value`. The value is a TOML value; quotes around a string may be left out."""
    key, separator, value = override.partition("=")
    if not separator or not key.strip():
        raise UsageError(f"override {override!r} is not of the form key=value, such as batch_size=16")
    try:
        return {key.strip(): tomllib.loads(f"value = {value}")["value"]}
    except tomllib.TOMLDecodeError:
        return {key.strip(): value.strip()}


def _check_keys(settings: Mapping[str, Any], path: Path) -> None:
    known = {entry.name: entry for entry in fields(RunConfig)}
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)
            raise UsageError(f"{path.name}: unknown key {key!r}: did you mean {near[0]!r}?")
    required = ("task", "steps", "batch_size", "train_examples", "test_examples", "learning_rate")
    missing = [key for key in required if key not in settings]
    if missing:
        raise UsageError(f"{path.name}: {', '.join(missing)} not given: add {missing[0]} = ... to the file")
