"""Libraries of a checkout that were built from other sources are not used, and everything works without them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import needs_compiler

from gact_dist._sources import FOLDERS, OTHER_SOURCES, fingerprint

ROOT = Path(__file__).resolve().parents[1]
SHOWN = """
import warnings
import torch
from gact_dist import codec
from gact_dist._short_ways import IS_BUILT, NOT_BUILT

warnings.simplefilter("ignore")
packed = codec.pack(torch.linspace(-1, 1, 4096), bits=4, seed=1)
print(IS_BUILT, codec.isa() != "reference", codec.unpack(packed).double().sum().item().hex())
print(NOT_BUILT)
print(codec.native_error)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package, of its libraries and of their sources."""
    for folder in ("gact_dist", "csrc"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def shown(checkout: Path) -> list[str]:
    command = [sys.executable, "-c", SHOWN]
    environment = {"PYTHONPATH": str(checkout), "HOME": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
def test_libraries_of_other_sources_are_not_used(checkout):
    usual = shown(checkout)[0].split()
    assert usual[:2] == ["True", "True"]
    (checkout / "csrc" / "hooks" / "packer.h").write_text("// as after an update\n")
    changed = shown(checkout)
    assert changed[0].split() == ["False", "False", usual[2]]
    assert changed[1] == OTHER_SOURCES
    assert changed[2] == f"the native library is not used: {OTHER_SOURCES}"


@needs_compiler
def test_an_installed_package_has_no_sources_to_compare(checkout):
    shutil.rmtree(checkout / "csrc" / "hooks")
    assert shown(checkout)[0].split()[:2] == ["True", "True"]


def test_each_file_that_is_compiled_counts(checkout):
    known = fingerprint(checkout / "csrc")
    assert known == fingerprint(ROOT / "csrc")
    for folder in FOLDERS:
        file = next((checkout / "csrc" / folder).iterdir())
        content = file.read_bytes()
        file.write_bytes(content + b"\n")
        assert fingerprint(checkout / "csrc") != known
        file.write_bytes(content)
    (checkout / "csrc" / "cpu" / "kernels.h.swp").touch()  # as an editor does
    assert fingerprint(checkout / "csrc") == known
    (checkout / "csrc" / "cpu" / "new.h").touch()
    assert fingerprint(checkout / "csrc") != known
