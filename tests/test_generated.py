"""The generated files are up to date; the schema and the package accept and refuse the same blocks."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gact_dist.config import Block, Config, Offload, from_block

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_schema_are_what_the_source_says(generate):
    assert generate.PAGE.read_text() == generate.page(generate.PAGE.read_text())
    assert generate.RULES_PAGE.read_text() == generate.rules_page(generate.RULES_PAGE.read_text())
    assert json.loads(generate.SCHEMA.read_text()) == generate.schema()


def test_the_schema_has_every_key_with_its_default(generate):
    block = generate.schema()["properties"]["gact"]["properties"]
    assert set(block) == {f.name for f in (*fields(Block), *fields(Config))} | {"offload"}
    assert set(block["offload"]["properties"]) == {f.name for f in fields(Offload)}
    defaults = {name: value["default"] for name, value in block.items() if name not in ("offload", "enabled", "level")}
    assert Config(**defaults) == Config()


ANNOTATIONS = {"$schema", "title", "description", "default", "properties"}
TYPES = {"boolean": bool, "integer": int, "number": (int, float), "string": str, "object": dict, "null": type(None)}


def is_a(value: Any, kind: str) -> bool:
    """Whether a value is of a type of JSON Schema, to which true and false are no numbers."""
    return isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def faults(value: Any, schema: dict[str, Any], path: str = "") -> list[str]:
    """Where a value breaks a JSON Schema (draft 2020-12), by the keywords that our file uses; others are an error."""
    number, members = is_a(value, "number"), value if isinstance(value, dict) else {}
    properties = schema.get("properties", {})
    checks = {
        "type": lambda kinds: any(is_a(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
        "enum": lambda choices: value in choices,
        "minimum": lambda bound: not number or value >= bound,
        "maximum": lambda bound: not number or value <= bound,
        "exclusiveMinimum": lambda bound: not number or value > bound,
        "additionalProperties": lambda allowed: allowed or members.keys() <= properties.keys(),
    }
    keywords = {keyword: bound for keyword, bound in schema.items() if keyword not in ANNOTATIONS}
    found = [f"{path}: {keyword}" for keyword, bound in keywords.items() if not checks[keyword](bound)]
    for name in sorted(members.keys() & properties.keys()):
        found += faults(members[name], properties[name], f"{path}.{name}")
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_schema_accepts_the_ready_configs(generate, stage):
    settings = json.loads((ROOT / "configs" / "deepspeed" / f"zero{stage}.json").read_text())
    assert faults(settings, json.loads(generate.SCHEMA.read_text())) == []


@pytest.mark.parametrize(
    ("block", "where"),
    [
        ({"levle": "L2"}, ".gact: additionalProperties"),
        ({"offload": {"prefech": 1}}, ".gact.offload: additionalProperties"),
        ({"level": "L9"}, ".gact.level: enum"),
        ({"bits": 9}, ".gact.bits: maximum"),
        ({"adapt_interval": "10"}, ".gact.adapt_interval: type"),
    ],
)
def test_the_schema_refuses_what_the_package_refuses(generate, block, where):
    assert faults({"gact": block}, json.loads(generate.SCHEMA.read_text())) == [where]
    with pytest.raises((ValueError, TypeError), match="expected"):
        from_block(block)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_ready_blocks_are_accepted(stage):
    block = json.loads((ROOT / "configs" / "deepspeed" / f"zero{stage}.json").read_text())["gact"]
    assert from_block(block) == Config.from_level("L2")


def test_a_block_that_is_off_is_no_config():
    assert from_block({"enabled": False}) is None


@pytest.mark.parametrize("block", [{"levle": "L2"}, {"offload": {"prefech": 1}}, {"level": "L9"}, {"bits": 9}])
def test_a_wrong_block_is_refused(block):
    with pytest.raises(ValueError, match="expected"):
        from_block(block)
