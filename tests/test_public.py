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
from torch.utils._device import _device_constructors

import gact_dist

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(gact_dist.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

PUBLIC = {
    "LEVELS", "Config", "Controller", "MemoryReport", "PlanMismatchError", "ReportRow", "attach", "codec",
    "set_optimization_level",
}  # fmt: skip

# What each room (a folder of the package, or a file beside the folders) may import of ours.
BASE = {"_errors", "_fields", "_patches", "_paths", "_short_ways", "_sources", "_torch_internals"}
MAY_IMPORT = {
    **{name: set() for name in BASE},
    "_short_ways": {"_sources"},
    "codec": BASE,
    "config": {"codec"},
    "distributed": BASE,
    "offload": {"config"},
    "policies": {*BASE, "config", "distributed"},
    "hooks": {*BASE, "codec", "config", "distributed", "offload", "policies"},
    "sensitivity": {*BASE, "codec", "distributed", "hooks", "policies"},
    "adaptation": {*BASE, "codec", "distributed", "hooks", "policies", "sensitivity"},
    "report": {"hooks", "offload", "policies"},
    "run_log": set(),
    "steps": {
        *BASE, "adaptation", "codec", "config", "distributed", "hooks", "offload", "policies", "run_log", "sensitivity",
    },
    "controller": {*BASE, "adaptation", "config", "policies", "report", "sensitivity", "steps"},
    "deepspeed": {"config", "controller", "distributed", "offload"},
    "integrations": {"config", "controller", "deepspeed", "distributed", "steps"},
    "profile": {*BASE, "config", "controller", "distributed", "hooks", "policies", "sensitivity"},
    "cli": {*BASE, "__init__", "codec", "config", "controller", "policies", "profile", "run_log"},
    "__init__": {"codec", "config", "controller", "distributed", "hooks", "report", "steps"},
}  # fmt: skip


def room_of(path: str) -> str:
    """The folder of the package that a file is in, or the file itself."""
    return path.split("/")[0]


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
    ("settings", "VAR_KEYWORD", NEEDED),
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
    "Controller.log": [("values", "VAR_KEYWORD", NEEDED)],
    "Controller.save_plan": [("path", "plain", NEEDED)],
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
    assert fields == [*known, "made_from"]


def imports_of(path: str, tree: ast.Module) -> list[tuple[str, ...]]:
    """What of ours a file imports, in whatever form and place: (room, file in it, ...), as far as the import says."""
    here = path.split("/")[:-1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                parts = (*here[: len(here) - node.level + 1], *parts)
            elif parts[:1] == ("gact_dist",):
                parts = parts[1:]
            else:
                continue
            # from a package itself: each name may be one of its files
            found += [parts] if parts else [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            found += [name[1:] or ("__init__",) for name in names if name[0] == "gact_dist"]
    return found


@pytest.mark.parametrize("path", SOURCES)
def test_imports_run_one_way_between_rooms(path):
    room = room_of(path)
    assert room in MAY_IMPORT, "a file beside the rooms: say in MAY_IMPORT what it may import"
    others = {found[0] for found in imports_of(path, SOURCES[path])} - {room}
    assert others <= MAY_IMPORT[room]


def test_the_permitted_imports_hold_no_circle():
    settled: set[str] = set()
    while ready := {name for name, needs in MAY_IMPORT.items() if name not in settled and needs <= settled}:
        settled |= ready
    assert settled == set(MAY_IMPORT)


@pytest.mark.parametrize("room", sorted({room_of(path) for path in SOURCES if "/" in path}))
def test_the_files_of_a_room_hold_no_circle(room):
    files = {path.split("/")[1] for path in SOURCES if path.startswith(f"{room}/")} - {"__init__"}
    needs = {
        name: {found[1] for found in imports_of(f"{room}/{name}", SOURCES[f"{room}/{name}"]) if len(found) > 1}
        | {found[0] for found in imports_of(name, SOURCES[f"{room}/{name}"]) if len(found) == 1}
        for name in files
    }
    settled: set[str] = set()
    while ready := {name for name in files - settled if needs[name] & files <= settled}:
        settled |= ready
    assert settled == files


def imports_past_a_face(path: str, tree: ast.Module) -> list[str]:
    """What a file takes from inside another room, past that room's __init__."""
    rooms = {room_of(known) for known in SOURCES if "/" in known}
    return [
        ".".join(found)
        for found in imports_of(path, tree)
        if len(found) > 1 and found[0] in rooms and found[0] != room_of(path)
    ]


@pytest.mark.parametrize("path", SOURCES)
def test_nobody_reaches_past_the_face_of_a_room(path):
    assert imports_past_a_face(path, SOURCES[path]) == []


@pytest.mark.parametrize("room", sorted({room_of(path) for path in SOURCES if "/" in path}))
def test_a_face_has_what_is_used_outside_and_no_more(room):
    face = SOURCES[f"{room}/__init__"]
    offered = {
        alias.asname or alias.name for node in face.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert inspect.getdoc(importlib.import_module(f"gact_dist.{room}"))
    assert set(importlib.import_module(f"gact_dist.{room}").__all__) == offered
    used: set[str] = set(PUBLIC_CODEC) if room == "codec" else set()
    for path, tree in SOURCES.items():
        if room_of(path) != room:
            used |= names_used_of(room, path, tree)
    assert offered - used == set(), "nothing outside uses these"
    assert used - offered == set()


# What users call of gact_dist.codec, which is public.
PUBLIC_CODEC = {
    "Packed",
    "UnitWidths",
    "pack",
    "unpack",
    "pack_mask",
    "pack_binary",
    "pack_narrow",
    "DEFAULT_GROUP_SIZE",
}


def names_used_of(room: str, path: str, tree: ast.Module) -> set[str]:
    """Names that a file takes of a room: imported, or as attributes of the room where that is imported itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for parts in imports_of(path, ast.Module([node], [])):
                if parts == (room,) and (node.module or "").split(".")[-1] == room:
                    found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == room:
            imported = any(
                isinstance(other, ast.ImportFrom) and other.level and any(alias.name == room for alias in other.names)
                for other in ast.walk(tree)
            )
            found |= {node.attr} if imported else set()
    return found


def test_a_reach_past_a_face_is_found():
    bad = "from ..codec.packed import pack\nfrom ..codec import pack\nimport gact_dist.codec.ops\n"
    assert imports_past_a_face("hooks/engine", ast.parse(bad)) == ["codec.packed", "codec.ops"]


def files_with(pattern: str) -> set[str]:
    return {path for path in SOURCES if re.search(pattern, (PACKAGE / f"{path}.py").read_text())}


def test_only_one_file_talks_to_other_ranks():
    talks = r"(import|from) torch\.distributed( |\.distributed_c10d)|\bdist\.|all_reduce\(|all_gather\(|broadcast\("
    assert files_with(talks) == {"distributed/collectives"}


def test_only_the_engine_hooks_saved_tensors():
    assert files_with(r"import saved_tensors_hooks|graph\.saved_tensors_hooks") == {"hooks/engine"}


def test_a_policy_is_told_by_its_class_outside_of_config_and_policies():
    compared = r"\bpolicy\s*(==|!=|in\b|not in\b)|(==|!=)\s*[\"'](gact|actnn|acgc|uniform|exact|off)[\"']"
    assert {path for path in files_with(compared) if not path.startswith("policies/")} == {"config"}


def test_two_files_know_deepspeed():
    assert files_with(r"import deepspeed|from deepspeed|[\"']deepspeed[\"'./]") == {
        "__init__", "deepspeed", "distributed/zero",
    }  # fmt: skip


def test_what_torch_does_not_document_is_gathered_in_one_file_and_those_of_the_frameworks():
    # torch._check is public, and torch.utils._pytree has no public name
    pattern = r"\btorch\._(?!check\b)|\btorch\.\w+(\.\w+)*\._(?!pytree\b)|import _[A-Z]|_raw_saved|_cdata"
    assert {path for path in files_with(pattern) if not path.startswith("distributed/")} == {"_torch_internals"}


def without_device(tree: ast.Module) -> list[str]:
    """Tensors that are made on whatever device torch.set_default_device() names."""
    made = {function.__name__ for function in _device_constructors()}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in made}
        and not any(keyword.arg == "device" for keyword in node.keywords)
    ]


@pytest.mark.parametrize("path", SOURCES)
def test_tensors_are_made_on_a_device_that_is_named(path):
    assert without_device(SOURCES[path]) == []


def test_a_tensor_without_a_device_is_found():
    assert len(without_device(ast.parse("torch.ones(3)\ntorch.zeros(3, device='cpu')\nx.new_ones(3)"))) == 1


# Where an error of a measurement ends and the job goes on; what the job itself raises is raised (its [Note]). And where
# a function of the user's is called once more than the job calls it, to see whether it may be.
BARRIERS = ("adaptation/attempts", "hooks/functions_again")


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


@pytest.mark.parametrize("path", SOURCES)
def test_package_code_neither_prints_nor_asserts_nor_swallows(path):
    allowed = r"blanket except at line \d+" if path in BARRIERS else "$"
    assert [fault for fault in faults(SOURCES[path]) if not re.fullmatch(allowed, fault)] == []


def generic_named_tuples(tree):
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base).partition("[")[0] for base in node.bases} for node in classes}
    return [name for name, found in bases.items() if {"NamedTuple", "Generic"} <= found]


@pytest.mark.parametrize("path", SOURCES)
def test_no_named_tuple_is_generic(path):
    """Python 3.10 refuses to make such a class, so the package could not be imported there."""
    assert generic_named_tuples(SOURCES[path]) == []


def test_a_generic_named_tuple_is_found():
    source = "class A(NamedTuple, Generic[T]):\n x: T\nclass B(NamedTuple):\n x: int"
    assert generic_named_tuples(ast.parse(source)) == ["A"]


@pytest.mark.parametrize("path", BARRIERS)
def test_one_handler_of_a_barrier_alone_catches_every_error(path):
    assert len(faults(SOURCES[path])) == 1


def test_faults_are_found():
    handlers = (
        "try: x()\nexcept: y()\ntry: x()\nexcept (ValueError, Exception): y()\ntry: x()\nexcept ValueError: y()\n"
    )
    assert len(faults(ast.parse("assert x\nprint(x)\n" + handlers))) == 4


AFTER_IMPORT = """
import sys, torch
before = torch.get_rng_state()
import gact_dist
frameworks = ("deepspeed", "torch.distributed.fsdp", "transformers", "matplotlib", "accelerate", "lightning", "cupy")
held = [name for name in frameworks if name in sys.modules]
state = torch.cuda.is_initialized(), torch.distributed.is_available() and torch.distributed.is_initialized()
print(*state, torch.equal(before, torch.get_rng_state()), held)
"""


def test_importing_starts_nothing_and_pulls_in_no_framework():
    result = subprocess.run([sys.executable, "-c", AFTER_IMPORT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False True []"


def test_every_script_of_benchmarks_can_be_imported():
    scripts = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert {script.parent.name for script in scripts} >= {"codec", "step", "adaptation", "gradient", "fidelity"}
    for script in scripts:
        module = importlib.import_module(".".join(script.relative_to(ROOT).with_suffix("").parts))
        assert Path(module.__file__) == script
