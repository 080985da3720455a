"""The wheel and the sdist: what they hold, and that a wheel works elsewhere, with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.large  # the native library is compiled twice
LONGEST_S = 900
LARGEST_BYTES = 4 << 20  # with debug information it was 7.8 million
SOURCES = [
    "_gact_dist_command.py",
    "CHANGELOG.md",
    "MANIFEST.in",
    "README.md",
    "csrc",
    "gact_dist",
    "pyproject.toml",
    "setup.py",
    "tests",
]
ONE_STEP = """
import warnings
from pathlib import Path
import torch
from torch import nn
import gact_dist

warnings.simplefilter("always")
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 4))
gact = gact_dist.attach(model)
batch = torch.randn(256, 64)
loss_fn = lambda batch: model(batch).square().mean()
with gact.step(loss_fn, batch):
    loss = loss_fn(batch)
loss.backward()
print(Path(gact_dist.__file__).parent)
print(gact.report().ratio)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder outside the repository; what it prints is the message where it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, "PYTHONPATH": "", **environment},
        capture_output=True, text=True, timeout=LONGEST_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def wheel_of(project: Path, folder: Path, **environment: str) -> Path:
    """Build the wheel of a project without the network, in a copy, as a build leaves a folder of its results there."""
    project = shutil.copytree(project, folder / "project")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "-w", folder, project, cwd=folder, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def one_step(wheel: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Install a wheel in a folder of its own, and compress one step with what is there."""
    site = folder / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "-t", site, wheel, cwd=folder)
    done = run(sys.executable, "-c", ONE_STEP, cwd=folder, PYTHONPATH=str(site), GACT_DISABLE="0")
    where, ratio = done.stdout.split()
    assert Path(where) == site / "gact_dist"
    assert float(ratio) > 3
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, unpacked: made from the files that git would check out."""
    folder = tmp_path_factory.mktemp("sdist")
    project = folder / "project"
    listed = subprocess.run(["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    make = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    run(sys.executable, "-c", make, cwd=project)
    (archive,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_sdist_has_every_source(sdist):
    for folder, pattern in (("csrc", "*"), ("gact_dist", "*.py")):
        for source in (ROOT / folder).rglob(pattern):
            assert source.is_dir() or (sdist / source.relative_to(ROOT)).is_file(), source
    assert (sdist / "gact_dist" / "py.typed").is_file()
    assert (sdist / "CHANGELOG.md").is_file()
    assert not (sdist / "tests").exists()  # setuptools takes a part of them along by itself


def test_a_wheel_works_away_from_the_repository(sdist, tmp_path):
    wheel = wheel_of(sdist, tmp_path)
    assert "-cp310-abi3-linux_" in wheel.name  # both need no particular version of Python
    assert wheel.stat().st_size < LARGEST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    cuda = {f"gact_dist/csrc/{path.relative_to(ROOT / 'csrc')}" for path in (ROOT / "csrc" / "cuda").iterdir()}
    assert {"gact_dist/_native.so", "gact_dist/_hooks.so", "gact_dist/py.typed", *cuda} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"gact_dist", "_gact_dist_command.py"}
    metadata, entry_points = (next(n for n in names if n.endswith(end)) for end in ("METADATA", "entry_points.txt"))
    assert "gact-dist = _gact_dist_command:main" in zipfile.ZipFile(wheel).read(entry_points).decode()
    fields = HeaderParser().parsestr(zipfile.ZipFile(wheel).read(metadata).decode())
    assert fields["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in fields.get_all("Classifier")
    assert {"cli", "cuda12", "cuda13", "docs", "dev"} <= set(fields.get_all("Provides-Extra"))
    assert "slow PyTorch reference" not in one_step(wheel, tmp_path).stderr


def test_a_wheel_that_was_built_without_a_compiler_works_and_says_that_it_is_slow(sdist, tmp_path):
    wheel = wheel_of(sdist, tmp_path, CC="/bin/false", CXX="/bin/false")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "slow PyTorch reference" in one_step(wheel, tmp_path).stderr
