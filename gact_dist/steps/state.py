"""A controller's state as one text, and the key that it has in a checkpoint of all ranks.

[Note: one key a stage] torch.distributed.checkpoint keeps one value for a key, that of the lowest rank which saves it,
and hands it to all. The stages of a pipeline have plans of their own, so the key of a stage tells which modules it
holds. Their names must differ between stages, as they must for the model's own state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from .. import _fields
from .._fields import StateError
from ..distributed import unwrap, user_path
from ..policies import Plan, bits_from_state

VERSION = 2
"""of the text; version 1 had no number, and held the plan's default among what the hooks had learnt"""
_KEY = "gact_dist"
_DIGEST_BYTES = 6
_ADAPTATIONS_WITH_TENSORS = 100


@dataclass(frozen=True)
class State:
    """What a run needs to go on; each value has been checked."""

    step: int
    adapted_at: int | None
    interval: int
    plan: Plan
    sensitivity: dict[str, float]
    history: list[dict[str, Any]]
    hooks: dict[str, Any]
    """of SavedTensorHooks.state_dict()"""
    adapter: dict[str, Any]
    """of Adapter.state_dict()"""
    optimizer_steps: int | None
    """of OptimizerSteps.state"""
    verifier: dict[str, Any]
    """of Verifier.state_dict()"""
    failed: int
    """adaptations in a row in which nothing could be measured"""

    def fields(self) -> dict[str, Any]:
        """Plain values for JSON. With compression off there is no default to speak of."""
        default = {"default_bits": self.plan.default} if self.hooks else {}
        return {
            "version": VERSION,
            "step": self.step,
            "adapted_at": self.adapted_at,
            "interval": self.interval,
            "failed": self.failed,
            "optimizer_steps": self.optimizer_steps,
            "plan": self.plan.bits,
            **default,
            "sensitivity": self.sensitivity,
            "engine": self.hooks,
            "adapter": self.adapter,
            "verifier": self.verifier,
            "history": bounded(self.history),
        }

    @staticmethod
    def from_fields(fields: Mapping[str, Any], interval: int, default_bits: int | None) -> State:
        """The state that some fields describe; unknown keys are ignored, and keys that an older version lacks take
        their defaults. interval, default_bits: where the fields have none. Raises StateError."""
        version = _fields.read(fields, "version", _fields.integer(1), 1)
        if version > VERSION:
            raise StateError(f"'version' is {version}, written by a newer gact_dist; this one reads up to {VERSION}")
        hooks = _fields.read(fields, "engine", _fields.mapping(_fields.anything), {})
        default = fields.get("default_bits", default_bits)
        if version == 1:
            default = hooks.get("unmeasured_bits", default_bits)
        bits = _fields.read(fields, "plan", _fields.mapping(bits_from_state))
        known = bits_from_state("default_bits", default)
        if isinstance(known, tuple):
            raise StateError(f"'default_bits' is {default!r}, expected one width")
        return State(
            step=_fields.read(fields, "step", _fields.integer(0)),
            adapted_at=_fields.read(fields, "adapted_at", _fields.optional(_fields.integer(0)), None),
            interval=_fields.read(fields, "interval", _fields.integer(1), interval),
            plan=Plan(bits, known),
            sensitivity=_fields.read(fields, "sensitivity", _fields.mapping(_fields.number()), {}),
            history=_fields.read(fields, "history", _fields.sequence(_fields.mapping(_fields.anything)), []),
            hooks=hooks,
            adapter=_fields.read(fields, "adapter", _fields.mapping(_fields.anything), {}),
            optimizer_steps=_fields.read(fields, "optimizer_steps", _fields.optional(_fields.integer(0)), None),
            verifier=_fields.read(fields, "verifier", _fields.mapping(_fields.anything), {}),
            failed=_fields.read(fields, "failed", _fields.integer(0), 0),
        )


def state_key(model: nn.Module, shared_by_all: bool) -> str:
    """The one key of a state. shared_by_all: every rank of the job holds these modules, and shares their plan."""
    if shared_by_all:
        return _KEY
    names = "\n".join(sorted(module_paths(model)))
    return f"{_KEY}.{hashlib.blake2b(names.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"


def write_state(key: str, state: State, settings: Mapping[str, Any]) -> dict[str, str]:
    """{key: one JSON text}. settings: of the controller, for people to read."""
    return {key: json.dumps({"config": settings, **state.fields()})}


def read_state(saved: Any, key: str, model: nn.Module, interval: int, default_bits: int | None) -> State:
    """What write() was given, or what it was given before stages had keys of their own.

    key: of this controller. model: its model; a state in which no module has a name of the model's is refused.
    interval, default_bits: for states that have none. Raises ValueError for anything but such a state, StateError for a
    value in it.
    """
    text = saved.get(key, saved.get(_KEY)) if isinstance(saved, Mapping) else None
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"the text under {key!r} in the state cannot be read ({error}); it was cut off or changed: pass what "
            "state_dict() returned"
        ) from None
    if not isinstance(fields, dict) or "plan" not in fields:
        got = f"keys {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"state holds {got}, expected {{{key!r}: ...}}: pass what state_dict() returned. Where the key has a "
            "number, it stands for the modules of a pipeline stage: pass what the same stage saved, or load nothing if "
            "the model was split or named otherwise then; the next adaptation makes a new plan"
        )
    state = State.from_fields(fields, interval, default_bits)
    _refuse_other_modules(state, model)
    return state


def bounded(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a controller and its state keep of a history: all adaptations, older ones without the tensors of each.

    A hundred adaptations with 300 tensors are 3.2 MB of text, a thousand with 500 would be 54 MB in every checkpoint;
    without its tensors an adaptation is 300 bytes.
    """
    older = max(0, len(history) - _ADAPTATIONS_WITH_TENSORS)
    without = [{**entry, "tensors": {}} if "tensors" in entry else entry for entry in history[:older]]
    return without + list(history[older:])


def _refuse_other_modules(state: State, model: nn.Module) -> None:
    roles = state.hooks.get("roles", {})
    names = [*state.plan.bits, *(roles if isinstance(roles, Mapping) else ())]
    saved = {name.partition(":")[0] for name in names} - {""}
    if saved and not saved & module_paths(model):
        raise ValueError(
            f"state has bits for modules {_some(saved)}, expected modules of this model, which has "
            f"{_some(module_paths(model) - {''})}: pass what this model's controller saved (of a pipeline, that of the "
            "same stage), or load nothing; the next adaptation makes a new plan"
        )


def module_paths(model: nn.Module) -> set[str]:
    """The modules of a model, by the paths that names begin with."""
    return {user_path(path) for path, _ in unwrap(model).named_modules()}


def _some(paths: set[str]) -> str:
    return ", ".join(sorted(paths)[:4]) + (", ..." if len(paths) > 4 else "")
