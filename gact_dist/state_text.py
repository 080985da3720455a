"""What a controller's state is kept as: one text, and the key that it has in a checkpoint of all ranks.

[Note: one key a stage] torch.distributed.checkpoint keeps one value for a key, that of the lowest rank which saves it,
and hands it to all. The stages of a pipeline have plans of their own, so the key of a stage tells which modules it
holds. Their names must differ between stages, as they must for the model's own state.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .distributed import unwrap, user_path

_KEY = "gact_dist"
_FIELDS = {"config", "step", "adapted_at", "interval", "plan", "sensitivity", "engine", "adapter", "history"}
_DIGEST_BYTES = 6
_ADAPTATIONS_WITH_TENSORS = 100


def key_of(model: nn.Module, shared_by_all: bool) -> str:
    """The one key of a state. shared_by_all: every rank of the job holds these modules, and shares their plan."""
    if shared_by_all:
        return _KEY
    names = "\n".join(sorted(_paths(model)))
    return f"{_KEY}.{hashlib.blake2b(names.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"


def bounded(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What a state keeps of a controller's history: all adaptations, older ones without the tensors of each.

    A hundred adaptations with 300 tensors are 3.2 MB of text, a thousand with 500 would be 54 MB in every checkpoint;
    without its tensors an adaptation is 300 bytes.
    """
    older = max(0, len(history) - _ADAPTATIONS_WITH_TENSORS)
    return [{**entry, "tensors": {}} for entry in history[:older]] + list(history[older:])


def write(key: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """{key: one JSON text}."""
    return {key: json.dumps(fields)}


def read(state: Any, key: str, model: nn.Module) -> dict[str, Any]:
    """What write() was given, or what it was given before stages had keys of their own. ValueError for anything else.

    key: of this controller. model: its model; a state in which no module has a name of the model's is refused.
    """
    text = state.get(key, state.get(_KEY)) if isinstance(state, Mapping) else None
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict) or set(fields) != _FIELDS:
        got = f"keys {sorted(state)}" if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"state holds {got}, expected {{{key!r}: ...}}: pass what state_dict() returned. Where the key has a "
            "number, it stands for the modules of a pipeline stage: pass what the same stage saved, or load nothing if "
            "the model was split or named otherwise then; the next adaptation makes a new plan"
        )
    _refuse_other_modules(fields, model)
    return fields


def _refuse_other_modules(fields: Mapping[str, Any], model: nn.Module) -> None:
    saved = {name.partition(":")[0] for name in (*fields["plan"], *fields["engine"].get("roles", {}))} - {""}
    if saved and not saved & _paths(model):
        raise ValueError(
            f"state has bits for modules {_some(saved)}, expected modules of this model, which has "
            f"{_some(_paths(model) - {''})}: pass what this model's controller saved (of a pipeline, that of the same "
            "stage), or load nothing; the next adaptation makes a new plan"
        )


def _paths(model: nn.Module) -> set[str]:
    return {user_path(path) for path, _ in unwrap(model).named_modules()}


def _some(paths: set[str]) -> str:
    return ", ".join(sorted(paths)[:4]) + (", ..." if len(paths) > 4 else "")
