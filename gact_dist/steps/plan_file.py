"""A plan in a file: the bits that a measurement on a model's own batch gave, to begin another run of the model with."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .._fields import StateError
from ..config import Config
from ..distributed import say, unwrap
from .state import State, module_paths

_log = logging.getLogger(__name__)
FORMAT, VERSION = "gact_dist plan", 1
_BUDGET = ("policy", "bits", "retained_bytes", "error")
_LEAST_MATCHING = 0.5


def write_plan_file(path: str, state: State, model: nn.Module, config: Config) -> None:
    """Write what a run needs to begin with a plan. Raises OSError."""
    settings = {key: value for key, value in config.to_dict().items() if key not in ("plan_file", "run_dir", "offload")}
    about = {"format": FORMAT, "version": VERSION, "model": type(unwrap(model)).__name__, "settings": settings}
    fields = replace(state, history=[]).fields()
    Path(path).expanduser().write_text(json.dumps({**about, "state": fields}, indent=1) + "\n")


def read_plan_file(path: str, model: nn.Module, config: Config, default_bits: int | None, holds_all: bool) -> State:
    """The state that a run begins in. holds_all: the model is all of the job's, and not a stage of a pipeline.

    Raises ValueError for a file that cannot be used, or that is of another model; warns of a plan that fits in part.
    """
    content = _content(path)
    try:
        state = State.from_fields(content["state"], config.adapt_interval, default_bits)
    except StateError as error:
        raise ValueError(f"plan_file {path} cannot be used: {error}; make it anew with gact-dist plan") from None
    _check_model(path, state, model, holds_all)
    made_for = content.get("settings", {})
    other = {key: made_for.get(key) for key in _BUDGET if made_for.get(key) != getattr(config, key)}
    if other:
        say(
            _log,
            "plan_file %s was made for %s: the next adaptation chooses bits for the settings of this run; give the "
            "same ones to keep them",
            path,
            ", ".join(f"{key}={value!r}" for key, value in other.items()),
        )
    return replace(
        state, step=0, adapted_at=0, interval=config.adapt_interval, history=[], optimizer_steps=None, failed=0
    )


def warn_of_unknown(path: str | None, planned: Mapping[str, Any], saved: set[str]) -> None:
    """After the first step: a plan's names may be of another version of the model's code, whose lines have moved."""
    matching = len(saved & planned.keys())
    if path is not None and matching < _LEAST_MATCHING * len(planned):
        say(
            _log,
            "plan_file %s has bits for %d tensors, of which the first step saved %d: the model's code has changed "
            "since, and with it the names; what has no bits has the default until the next adaptation; make the plan "
            "anew",
            path,
            len(planned),
            matching,
        )


def _content(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise ValueError(f"plan_file {path} cannot be read ({error}): make it with gact-dist plan") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("state"), dict):
        raise ValueError(f"plan_file {path} holds no plan, expected what gact-dist plan or save_plan() wrote")
    if not isinstance(content.get("version"), int) or content["version"] > VERSION:
        raise ValueError(
            f"plan_file {path} has version {content.get('version')}, this gact_dist reads up to {VERSION}: make it anew"
        )
    return content


def _check_model(path: str, state: State, model: nn.Module, holds_all: bool) -> None:
    planned = [module for module in (name.partition(":")[0] for name in state.plan.bits) if module]
    known = module_paths(model)
    matching = sum(module in known for module in planned)
    if planned and not matching:
        raise ValueError(
            f"plan_file {path} is of another model: of the {len(planned)} tensors that it has bits for none is in a "
            f"module of this one, they are in {', '.join(sorted(set(planned))[:3])}, ...: make a plan for this model "
            "with gact-dist plan"
        )
    if matching < len(planned) and holds_all:
        say(
            _log,
            "plan_file %s has bits for %d tensors, of which %d are in modules of this model: it may be of another "
            "model; tensors that it does not know have the default bits until the next adaptation",
            path,
            len(planned),
            matching,
        )
