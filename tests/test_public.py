"""The public surface: names and signatures as documented, imports that run one way, and an import without effects."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gact_dist

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(gact_dist.__file__).parent
SOURCES = {path.stem: ast.parse(path.read_text()) for path in sorted(PACKAGE.glob("*.py"))}

PUBLIC = {
    "LEVELS", "Config", "Controller", "MemoryReport", "PlanMismatchError", "ReportRow", "attach", "codec",
    "set_optimization_level",
}  # fmt: skip

# What each file may import of ours. A file that is not listed here has no place in the order yet: give it one.
MAY_IMPORT = {
    "config": set(),
    "knapsack": set(),
    "rounding_keys": set(),
    "allocation": {"knapsack"},
    "batches": set(),
    "isolation": {"wrappers"},
    "payload_format": set(),
    "philox": set(),
    "grid": set(),
    "ops_reference": {"grid", "payload_format", "philox"},
    "sync": set(),
    "wrappers": set(),
    "recomputation": set(),
    "naming": {"wrappers"},
    "cuda": {"payload_format"},
    "ops": {"cuda", "ops_reference", "payload_format"},
    "mixed_widths": {"ops", "payload_format"},
    "memory_layout": {"payload_format"},
    "codec": {"memory_layout", "mixed_widths", "ops", "payload_format"},
    "per_sample": {"allocation", "policies"},
    "sample_gradients": {"batches", "wrappers"},
    "error_bounded": {"mixed_widths", "ops_reference", "payload_format"},
    "packing": {
        "batches", "codec", "config", "error_bounded", "mixed_widths", "per_sample", "sample_gradients", "wrappers",
    },
    "operators": set(),
    "standins": {"operators"},
    "identity": {"naming", "wrappers"},
    "devices": set(),
    "offload_plan": set(),
    "host_memory": {"devices"},
    "offload_trace": {"config", "devices", "offload_plan"},
    "storage": {"config", "devices", "host_memory", "offload_plan", "offload_trace"},
    "handles": {"codec", "identity", "storage"},
    "attention": {"codec", "handles"},
    "memory": {"handles"},
    "block_inputs": {"operators", "recomputation"},
    "compiled": {"operators", "wrappers"},
    "inlined": {"codec"},
    "ledger": {"codec", "footprint", "handles", "memory"},
    "checkpoint_closures": {"identity", "ledger", "memory", "naming", "recomputation", "wrappers"},
    "engine": {
        "attention", "block_inputs", "checkpoint_closures", "codec", "compiled", "config", "footprint", "handles",
        "identity", "inlined", "ledger", "naming",
        "operators", "packing", "per_sample", "policies", "recomputation", "rounding_keys", "storage", "memory",
        "wrappers",
    },
    "graphs": set(),
    "gradient_error": {"compiled", "engine", "graphs", "isolation", "per_sample", "recomputation", "sensitivity"},
    "gradient_samples": set(),
    "plan_search": {"allocation", "config", "policies"},
    "report": {"gradient_error", "handles", "storage"},
    "influence": {"graphs", "handles", "recomputation"},
    "tensor_sensitivity": {"codec", "handles", "ops", "packing"},
    "sensitivity": {
        "codec", "compiled", "engine", "graphs", "handles", "influence", "isolation", "operators", "ops", "packing",
        "payload_format", "per_sample", "recomputation", "standins", "tensor_sensitivity",
    },
    "observation": {"batches"},
    "pipelines": set(),
    "state_text": {"wrappers"},
    "policies": {"allocation", "config"},
    "footprint": {"codec"},
    "samples": {"batches", "observation"},
    "error_budget": {
        "allocation", "engine", "gradient_error", "gradient_samples", "per_sample", "plan_search", "policies",
        "samples", "sync",
    },
    "adaptation": {
        "allocation", "codec", "compiled", "engine", "error_budget", "footprint", "gradient_error", "isolation",
        "per_sample", "policies", "samples", "sensitivity", "sync",
    },
    "attachment": {"config", "sync", "wrappers"},
    "controller": {
        "adaptation", "attachment", "batches", "compiled", "config", "engine", "observation", "per_sample",
        "pipelines", "policies", "report", "samples", "state_text", "storage", "sync", "wrappers",
    },
    "__init__": {"attachment", "codec", "config", "controller", "report", "sync"},
}  # fmt: skip


def test_public_names_are_the_documented_ones():
    assert set(gact_dist.__all__) == PUBLIC
    assert all(hasattr(gact_dist, name) for name in PUBLIC)


def test_every_public_object_says_what_it_is():
    undocumented = [name for name in PUBLIC - {"LEVELS"} if not inspect.getdoc(getattr(gact_dist, name))]
    for cls in (gact_dist.Controller, gact_dist.Config, gact_dist.MemoryReport):
        methods = {name: member for name, member in vars(cls).items() if not name.startswith("_") and callable(member)}
        undocumented += [f"{cls.__name__}.{name}" for name, member in methods.items() if not inspect.getdoc(member)]
    assert undocumented == []


def signature(function) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each parameter, without self."""
    short = {"POSITIONAL_OR_KEYWORD": "plain", "KEYWORD_ONLY": "keyword"}
    return [
        (p.name, short.get(p.kind.name, p.kind.name), p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name != "self"
    ]


NEEDED = inspect.Parameter.empty
ATTACH = [
    ("model", "plain", NEEDED),
    ("level", "plain", None),
    ("config", "keyword", None),
    ("process_group", "keyword", None),
]
SIGNATURES = {
    "attach": ATTACH,
    "Controller": ATTACH,
    "set_optimization_level": [("level", "plain", NEEDED)],
    "Controller.step": [("loss_fn", "plain", None), ("batch", "plain", None), ("sample_index", "keyword", None)],
    "Controller.calibrate": [("loss_fn", "plain", NEEDED), ("batch", "plain", NEEDED), ("samples", "plain", 8)],
    "Controller.report": [],
    "Controller.state_dict": [],
    "Controller.load_state_dict": [("state", "plain", NEEDED)],
    "Controller.detach": [],
    "Controller.follow": [],
    "Controller.install_hook": [],
    "Controller.iterate": [("fwdbwdprop", "plain", NEEDED)],
    "Controller.uninstall_hook": [],
    "codec.unpack": [("packed", "plain", NEEDED)],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_fixed_one(name):
    found = gact_dist
    for part in name.split("."):
        found = getattr(found, part)
    assert signature(found) == SIGNATURES[name]


def test_codec_takes_bits_and_seed_by_name_and_reports_its_size():
    tensor = torch.linspace(-1, 1, 1024)
    packed = gact_dist.codec.pack(tensor, bits=4, seed=0)
    assert packed.nbytes < tensor.nbytes // 4
    # the range is 2 and 4 bits have 15 steps: at most one step off, plus the outward rounding of scale and offset
    assert (gact_dist.codec.unpack(packed) - tensor).abs().max() <= 1.1 * 2 / 15
    assert torch.equal(gact_dist.codec.unpack(gact_dist.codec.pack(tensor, bits=None)), tensor)


def test_report_has_the_fixed_fields():
    report = gact_dist.attach(torch.nn.Linear(2, 2), level="L0").report()
    assert (report.exact_bytes, report.retained_bytes, report.ratio, tuple(report.rows)) == (0, 0, 1.0, ())
    fields = [field.name for field in dataclasses.fields(gact_dist.ReportRow)]
    known = ["name", "shape", "dtype", "codec", "bits", "bytes", "sensitivity", "host_bytes", "one_width_bytes"]
    assert fields == known


def imported_siblings(tree: ast.Module) -> set[str]:
    """Files of ours that a file imports, in whatever form and place."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "gact_dist"):
            parts = (node.module or "").removeprefix("gact_dist").lstrip(".").split(".")
            found |= {parts[0]} if parts[0] else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {name[1] if len(name) > 1 else "__init__" for name in names if name[0] == "gact_dist"}
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_imports_run_one_way(name):
    assert name in MAY_IMPORT
    assert imported_siblings(SOURCES[name]) <= MAY_IMPORT[name]


def test_the_permitted_imports_hold_no_circle():
    settled: set[str] = set()
    while ready := {name for name, needs in MAY_IMPORT.items() if name not in settled and needs <= settled}:
        settled |= ready
    assert settled == set(MAY_IMPORT)


def files_with(pattern: str) -> set[str]:
    return {path.stem for path in PACKAGE.glob("*.py") if re.search(pattern, path.read_text())}


def test_only_sync_talks_to_other_ranks():
    assert files_with(r"(import|from) torch\.distributed|\bdist\.|all_reduce\(|all_gather\(|broadcast\(") == {"sync"}


def test_only_the_engine_hooks_saved_tensors():
    assert files_with(r"import saved_tensors_hooks|graph\.saved_tensors_hooks") == {"engine"}


def faults(tree: ast.Module) -> list[str]:
    """What package code must not hold: print, assert, and handlers that swallow everything."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"assert at line {node.lineno}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"print at line {node.lineno}")
        elif isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
                found.append(f"blanket except at line {node.lineno}")
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_package_code_neither_prints_nor_asserts_nor_swallows(name):
    assert faults(SOURCES[name]) == []


def test_faults_are_found():
    handlers = (
        "try: x()\nexcept: y()\ntry: x()\nexcept (ValueError, Exception): y()\ntry: x()\nexcept ValueError: y()\n"
    )
    assert len(faults(ast.parse("assert x\nprint(x)\n" + handlers))) == 4


AFTER_IMPORT = """
import sys, torch
before = torch.get_rng_state()
import gact_dist
frameworks = ("deepspeed", "transformers", "matplotlib", "accelerate", "lightning", "cupy")
held = [name for name in frameworks if name in sys.modules]
state = torch.cuda.is_initialized(), torch.distributed.is_available() and torch.distributed.is_initialized()
print(*state, torch.equal(before, torch.get_rng_state()), held)
"""


def test_importing_starts_nothing_and_pulls_in_no_framework():
    result = subprocess.run([sys.executable, "-c", AFTER_IMPORT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False True []"


def test_every_script_of_benchmarks_can_be_imported(monkeypatch):
    for folder in (ROOT, ROOT / "benchmarks"):  # as when they are run
        monkeypatch.syspath_prepend(str(folder))
    for script in sorted((ROOT / "benchmarks").glob("*.py")):
        importlib.import_module(script.stem)
