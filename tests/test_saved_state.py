"""A state of an older version loads, and what cannot be used of one is one error that changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import small_models

import gact_dist
from gact_dist import Config

# Written before states had a version: for each policy the state after three steps, and what the next step keeps.
OLD = json.loads((Path(__file__).parent / "data" / "states_of_version_1.json").read_text())
SETTINGS = {
    "gact": {"bits": 3},
    "actnn": {"policy": "actnn", "bits": 2},
    "acgc": {"policy": "acgc", "error": 0.25},
    "bytes": {"retained_bytes": 60000},
    "uniform": {"policy": "uniform", "bits": 2},
    "off": {"policy": "off"},
}
SAVED = tuple(OLD)


def controller(name: str) -> tuple[gact_dist.Controller, object]:
    """(a new controller, a function that runs one step of its job)."""
    model, batch = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    # the version before stored what backward can make again
    gact = gact_dist.attach(model, config=Config(min_numel=64, adapt_interval=3, derive=False, **SETTINGS[name]))

    def step(**options: object) -> None:
        with gact.step(**options):
            loss = loss_fn(batch)
        loss.backward()

    return gact, step


def saved_fields(gact: gact_dist.Controller) -> dict:
    return json.loads(gact.state_dict()["gact_dist"])


@pytest.mark.parametrize("name", SAVED)
def test_a_state_of_the_version_before_loads_and_gives_the_same_bits(name):
    gact, step = controller(name)
    gact.load_state_dict(OLD[name]["state"])
    old = json.loads(OLD[name]["state"]["gact_dist"])
    assert json.loads(json.dumps(gact.plan)) == old["plan"]
    assert gact.history == old["history"]
    step()
    # the version before stored the batch as well
    expected = [row for row in OLD[name]["rows"] if ":Input" not in row[0]]
    rows = [row for row in gact.report().rows if ":Input" not in row.name]
    assert [[row.name, row.codec, row.bits, row.bytes] for row in rows] == expected
    assert len(expected) >= 3


@pytest.mark.parametrize("name", SAVED)
def test_a_state_goes_through_a_second_controller_unchanged(name):
    gact, _ = controller(name)
    gact.load_state_dict(OLD[name]["state"])
    again, _ = controller(name)
    again.load_state_dict(gact.state_dict())
    assert again.state_dict() == gact.state_dict()
    assert saved_fields(again)["version"] == 2


def test_keys_of_a_later_version_are_passed_over_and_missing_ones_take_their_defaults():
    gact, _ = controller("gact")
    fields = json.loads(OLD["gact"]["state"]["gact_dist"])
    for key in ("adapted_at", "interval", "sensitivity", "engine", "adapter", "history"):
        del fields[key]
    gact.load_state_dict({"gact_dist": json.dumps({**fields, "version": 2, "of a later one": [1, 2]})})
    assert gact.plan == fields["plan"]
    found = saved_fields(gact)
    assert (found["step"], found["adapted_at"], found["interval"]) == (3, None, 3)


@pytest.mark.parametrize("lacking", ["default_bits", "engine"])
def test_a_state_that_does_not_say_the_default_leaves_that_of_the_policy(lacking):
    gact, step = controller("gact")
    gact.load_state_dict(OLD["gact"]["state"])
    fields = {**saved_fields(gact), "plan": {}}
    if lacking == "engine":
        fields |= {"version": 1, "engine": {}}
    else:
        del fields["default_bits"]
    again, step = controller("gact")
    again.load_state_dict({"gact_dist": json.dumps(fields)})
    step()
    step()
    assert {row.bits for row in again.report().rows if row.codec == "quantised"} == {3}


def test_a_plan_survives_a_while_with_compression_off():
    off, step = controller("off")
    off.load_state_dict(OLD["gact"]["state"])
    step()
    on, _ = controller("gact")
    on.load_state_dict(off.state_dict())
    assert on.plan == off.plan == json.loads(OLD["gact"]["state"]["gact_dist"])["plan"]
    assert saved_fields(on)["default_bits"] == 3


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("gact", "step", "three", r"'step' is 'three' \(str\), expected a whole number"),
        ("gact", "step", -1, "'step' is -1"),
        ("gact", "step", True, "'step' is True"),
        ("gact", "adapted_at", 1.5, "'adapted_at' is 1.5"),
        ("gact", "interval", 0, "'interval' is 0"),
        ("gact", "optimizer_steps", -1, "'optimizer_steps' is -1"),
        ("gact", "version", 3, "written by a newer gact_dist"),
        ("gact", "version", "2", "'version' is '2'"),
        ("gact", "plan", [1, 2], "'plan' is"),
        ("gact", "plan/0:Input", 9, r"expected 1 to 8 bits"),
        ("gact", "plan/0:Input", 0, "0:Input' is 0"),
        ("gact", "plan/0:Input", 2.5, "0:Input' is 2.5"),
        ("actnn", "plan/0:Input", [4, 3, 12], "expected 1 to 8 bits"),
        ("gact", "sensitivity/0:Input", "much", "'sensitivity.0:Input' is 'much'"),
        ("gact", "history", {}, "'history' is {}"),
        ("gact", "engine/roles", [], "'roles' is"),
        ("gact", "engine/roles/0:Input", "guest", "expected one of activation, statistic, binary"),
        ("gact", "engine/top_level", [["0:Input"]], r"'top_level\[0\]' is"),
        ("gact", "engine/top_level", [{"name": 1, "line": None}], "'name' is 1"),
        ("gact", "engine/aliases", [{"name": "0:Input"}], "'line' is missing"),
        ("gact", "engine/store_base", [1], r"'store_base\[0\]' is 1"),
        ("gact", "engine/unmeasured_bits", 40, "'default_bits' is 40"),
        ("gact", "adapter/heaviest_bytes", -5, "'heaviest_bytes' is -5"),
        ("actnn", "adapter/sample_gradients", "no base64!", "'sample_gradients' is not a deflated array"),
        ("acgc", "adapter/error_budget", 3, "'error_budget' is 3"),
        ("acgc", "adapter/error_budget/growth", 0.5, "'growth' is 0.5"),
        ("acgc", "adapter/error_budget/samples/squares", [1.0, None], r"'squares\[1\]' is None"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_error_and_nothing_changes(name, path, value, message):
    gact, step = controller(name)
    gact.load_state_dict(OLD[name]["state"])
    before, history = gact.state_dict(), copy.deepcopy(gact.history)
    fields = json.loads(OLD[name]["state"]["gact_dist"])
    fields["step"] = 77  # would be seen if a part of it were used
    *folders, key = path.split("/")
    inner = fields
    for folder in folders:
        inner = inner[folder]
    inner[key] = value
    with pytest.raises(ValueError, match=message):
        gact.load_state_dict({"gact_dist": json.dumps(fields)})
    assert gact.state_dict() == before
    assert gact.history == history
    step()


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_text_that_was_cut_off_is_an_error_and_nothing_changes(kept):
    gact, _ = controller("gact")
    before, text = gact.state_dict(), OLD["gact"]["state"]["gact_dist"]
    with pytest.raises(ValueError, match=r"cannot be read .* it was cut off or changed: pass what state_dict"):
        gact.load_state_dict({"gact_dist": text[: int(kept * len(text))]})
    assert gact.state_dict() == before


def test_a_history_has_the_tensors_of_the_last_adaptations_alone(monkeypatch):
    monkeypatch.setattr("gact_dist.steps.state._ADAPTATIONS_WITH_TENSORS", 2)
    model, batch = small_models.mlp()
    gact = gact_dist.attach(model, config=Config(min_numel=64, bits=3))
    for _ in range(4):
        gact.calibrate(small_models.loss_of(model), batch)
    assert [bool(entry["tensors"]) for entry in gact.history] == [False, False, True, True]
    assert saved_fields(gact)["history"] == json.loads(json.dumps(gact.history))
