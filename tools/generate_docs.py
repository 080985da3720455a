"""Write what is generated from the source: the table of settings in docs/configuration.md, that of backward formulas
in docs/backward_rules.md, and configs/deepspeed/gact.schema.json.

    .venv/bin/python tools/generate_docs.py

tests/test_generated.py fails if the files are out of date.
"""

import ast
import inspect
import json
import textwrap
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from gact_dist.config import (
    COMPILE_HOOKS,
    COMPRESSORS,
    ESTIMATORS,
    GROUP_SIZES,
    LAYOUTS,
    LEVELS,
    LOG_SOFTMAX,
    POLICIES,
    Block,
    Config,
    Offload,
)
from gact_dist.hooks.backward_rules import BESIDE, CONDITIONAL, PASSED, POINTWISE, PRODUCTS, RULES, SINGULAR, Rule

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "configs" / "deepspeed" / "gact.schema.json"
PAGE = ROOT / "docs" / "configuration.md"
START, END = "<!-- generated: settings -->", "<!-- end of generated -->"
RULES_PAGE = ROOT / "docs" / "backward_rules.md"
RULES_START = "<!-- generated: rules -->"
JSON_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "None": "null",
    "Sequence": "array",
}
LIMITS: dict[str, dict[str, Any]] = {
    "policy": {"enum": list(POLICIES)},
    "compressor": {"enum": list(COMPRESSORS)},
    "estimator": {"enum": list(ESTIMATORS)},
    "blocks": {"items": {"type": "string"}},
    "level": {"enum": list(LEVELS)},
    "bits": {"minimum": 1, "maximum": 8},
    "retained_bytes": {"minimum": 1},
    "error": {"exclusiveMinimum": 0},
    "adapt_interval": {"minimum": 1},
    "adapt_tolerance": {"minimum": 0},
    "noise_limit": {"minimum": 0},
    "watch_interval": {"minimum": 0},
    "calibration_samples": {"minimum": 1},
    "group_size": {"enum": list(GROUP_SIZES)},
    "layout": {"enum": list(LAYOUTS)},
    "log_softmax": {"enum": list(LOG_SOFTMAX)},
    "min_numel": {"minimum": 0},
    "compile_hooks": {"enum": list(COMPILE_HOOKS)},
    "max_host_bytes": {"minimum": 0},
    "max_device_bytes": {"minimum": 0},
    "min_bytes": {"minimum": 1},
    "prefetch": {"minimum": 0},
}


def described(cls: type) -> list[tuple[str, str, object, str]]:
    """(name, type, default, text) of each plain field of a settings class; the text is the string under the field."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    texts = {
        ast.unparse(statement.target): " ".join(ast.literal_eval(following.value).split())
        for statement, following in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }
    return [
        (f.name, str(getattr(f.type, "__name__", f.type)), f.default, texts[f.name])
        for f in fields(cls)
        if f.type is not Offload
    ]


def rows() -> list[tuple[str, str, object, str]]:
    """All keys of the block; nested ones have a dot."""
    nested = [(f"offload.{name}", kind, default, text) for name, kind, default, text in described(Offload)]
    return [*described(Block), *described(Config), *nested]


def table() -> str:
    """The settings as a Markdown table."""
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, kind, default, text in rows():
        shown = "" if default is MISSING else f"`{json.dumps(default)}`"
        lines.append(f"| `{name}` | {json_types(kind)[0]} | {shown} | {text} |")
    return "\n".join(lines)


def schema() -> dict:
    """JSON Schema (2020-12) of a DeepSpeed config with an optional "gact" block."""
    block = {entry[0]: _property(*entry) for entry in [*described(Block), *described(Config)]}
    offload = {entry[0]: _property(*entry) for entry in described(Offload)}
    block["offload"] = {"type": "object", "properties": offload, "additionalProperties": False}
    gact = {"type": "object", "properties": block, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": 'A DeepSpeed config with a "gact" block',
        "type": "object",
        "properties": {"gact": gact},
    }


def _property(name: str, kind: str, default: object, text: str) -> dict:
    types = json_types(kind)
    return {
        "type": types if len(types) > 1 else types[0],
        "default": list(default) if isinstance(default, tuple) else default,
        "description": text,
        **LIMITS.get(name, {}),
    }


def json_types(kind: str) -> list[str]:
    """The JSON types of an annotation such as "float | None"."""
    return [JSON_TYPES[part] for part in kind.split(" | ")]


def table_of_rules() -> str:
    """The backward formulas that rounding would break as a Markdown table, and what stands beside a pole."""
    lines = ["| operator | saved | its backward | kept instead |", "|---|---|---|---|"]
    found = {**{operator: (rule,) for operator, rule in RULES.items()}, **CONDITIONAL}
    for operator in sorted(found):
        lines += [_row_of_rule(operator, rule) for rule in found[operator]]
    beside = {
        "has a pole": sorted(SINGULAR),
        "passes a gradient on": sorted(PASSED),
        "multiplies it, element by element": sorted(POINTWISE),
        "the same before an operator that solves": sorted(PRODUCTS),
    }
    names = [f"* {what}: {', '.join(operators)}" for what, operators in beside.items()]
    return "\n".join([*lines, "", f"What {BESIDE.reason} is stored exactly as well:", "", *names])


def _row_of_rule(operator: str, rule: Rule) -> str:
    slots = ", ".join(f"`{slot}`" for slot in rule.slots)
    reason = f"{rule.reason}; {rule.condition}" if rule.condition else rule.reason
    return f"| {operator} | {slots} | {reason} | {rule.shown + ', or exact' if rule.shown else 'exact'} |"


def page(text: str) -> str:
    """The page with its generated part replaced."""
    return _replaced(text, START, table())


def rules_page(text: str) -> str:
    """The same for the page of backward formulas."""
    return _replaced(text, RULES_START, table_of_rules())


def _replaced(text: str, start: str, generated: str) -> str:
    before, rest = text.split(start)
    after = rest.split(END)[1]
    return f"{before}{start}\n{generated}\n{END}{after}"


def main() -> None:
    """Write all files."""
    RULES_PAGE.write_text(rules_page(RULES_PAGE.read_text()))
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
