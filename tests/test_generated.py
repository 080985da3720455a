"""Files that docs/generate.py makes are up to date, and the schema accepts what the package accepts."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from pathlib import Path

import pytest

from gact_dist.config import Block, Config, Offload, from_block

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_schema_are_what_the_source_says(generate):
    assert generate.PAGE.read_text() == generate.page(generate.PAGE.read_text())
    assert json.loads(generate.SCHEMA.read_text()) == generate.schema()


def test_the_schema_has_every_key_with_its_default(generate):
    block = generate.schema()["properties"]["gact"]["properties"]
    assert set(block) == {f.name for f in (*fields(Block), *fields(Config))} | {"offload"}
    assert set(block["offload"]["properties"]) == {f.name for f in fields(Offload)}
    defaults = {name: value["default"] for name, value in block.items() if name not in ("offload", "enabled", "level")}
    assert Config(**defaults) == Config()


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
