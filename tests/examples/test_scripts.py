"""Training scripts as their users write them, run as they are and with two or three lines put in by a textual patch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import torch

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / ".cache" / "data" / "mnist_5k.csv.gz"


def patched(name: str, changes: dict[str, str], folder: Path) -> Path:
    """The script in a folder of its own, each text in it replaced by another; every text must be there once."""
    text = (SCRIPTS / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    script = folder / name
    script.write_text(text)
    return script


def run(*command: str | Path) -> None:
    """Run a launcher to its end; it and its ranks are a session of their own, which does not outlive the test."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    launcher = subprocess.Popen(
        [str(part) for part in command], env=environment, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = launcher.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        raise
    assert launcher.returncode == 0, output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# -- a GPT in one file: DDP, accumulation under no_sync, bf16 autocast, clipping, checkpoints -------------------------

ACCUMULATION = 2


def gpt_lines(level: str) -> dict[str, str]:
    """Two lines to attach, and for resuming one in the checkpoint and one to load it; two more for the test to see."""
    config = f'gact_dist.Config.from_level("{level}", adapt_interval=4, min_numel=16)'
    return {
        "import torch.nn as nn\n": "import torch.nn as nn\nimport gact_dist\n",
        "    model = DDP(model)\n": (
            f"    model = DDP(model)\ngact = gact_dist.attach(model, config={config}).follow()\n"
            'if args.resume:\n    gact.load_state_dict(checkpoint["gact"])\n'
        ),
        '            "iteration": iteration + 1,\n': (
            '            "iteration": iteration + 1,\n            "gact": gact.state_dict(),\n'
            '            "variance": getattr(gact.adaptation, "predicted_variance", None),\n'
            '            "ratio": gact.report().ratio,\n'
        ),
    }


def train_gpt(folder: Path, changes: dict[str, str], *arguments: str) -> dict:
    folder.mkdir(exist_ok=True)
    script = patched("train_gpt.py", changes, folder)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(*torchrun, script, "--data", ROOT / "README.md", "--out", folder, *arguments)
    return json.loads((folder / "log.json").read_text())


def saved(folder: Path, name: str = "ckpt.pt") -> dict:
    return torch.load(folder / name)


def same_weights(first: dict, second: dict) -> bool:
    return all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])


def test_a_gpt_script(tmp_path):
    plain = train_gpt(tmp_path / "plain", {})
    exact = train_gpt(tmp_path / "exact", gpt_lines("exact"))
    assert exact == plain
    assert same_weights(saved(tmp_path / "exact"), saved(tmp_path / "plain"))

    rounded = train_gpt(tmp_path / "L2", gpt_lines("L2"))
    final = saved(tmp_path / "L2")
    assert final["ratio"] > 2.5  # bfloat16 to 4 bits, and the float32 log-softmax as it is
    assert rounded["losses"][0] == plain["losses"][0]  # the forward is untouched
    assert rounded["losses"] != plain["losses"]
    # In the first iteration the weights are still the same, so its gradient is g + e, and its norm is off by |e| at
    # most. |e|^2 is a micro-batch's predicted variance (that of one rank) times their number, over the ranks; the first
    # micro-batch, with bits that are uniform yet, may have several times more. 4 bits are good for a factor of 2.
    error = (2 * (1 + 3) * saved(tmp_path / "L2", "ckpt-3.pt")["variance"] / 2) ** 0.5
    assert 0 < abs(rounded["norms"][0] - plain["norms"][0]) < error < plain["norms"][0]

    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "L2" / "ckpt-3.pt", tmp_path / "resumed" / "ckpt.pt")
    resumed = train_gpt(tmp_path / "resumed", gpt_lines("L2"), "--resume")
    assert resumed["losses"] == rounded["losses"][3:]
    assert same_weights(saved(tmp_path / "resumed"), final)


def test_a_compiled_gpt_script(tmp_path):
    # inductor would take a minute
    quickly = {"torch.compile(model)": 'torch.compile(model, backend="aot_eager")'}
    plain, exact, rounded = (
        train_gpt(tmp_path / level, quickly | ({} if level == "plain" else gpt_lines(level)), "--compile")
        for level in ("plain", "exact", "L2")
    )
    assert exact == plain
    assert same_weights(saved(tmp_path / "exact"), saved(tmp_path / "plain"))
    assert rounded["losses"][0] == plain["losses"][0]
    assert saved(tmp_path / "L2")["ratio"] > 2  # as in test_a_gpt_script, with casts of the weights


# -- DeepSpeed: args, a JSON file, training_data, the engine's own loader --------------------------------------------

DIGITS = {
    "import deepspeed\n": "import deepspeed\nimport gact_dist\n",
    "= deepspeed.initialize(": "= gact_dist.deepspeed.initialize(",
}


def train_digits(folder: Path, block: dict | None) -> tuple[dict, dict]:
    """(log, weights) under the deepspeed launcher."""
    folder.mkdir()
    config = {
        "train_batch_size": 128,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        **({} if block is None else {"gact": block}),
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    script = patched("train_digits.py", {} if block is None else DIGITS, folder)
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port())]
    arguments = ["--deepspeed", "--deepspeed_config", folder / "ds_config.json", "--data", DATA, "--out", folder]
    run(*launcher, script, *arguments)
    return json.loads((folder / "log.json").read_text()), torch.load(folder / "model.pt")


def test_a_deepspeed_script(tmp_path):
    plain, weights = train_digits(tmp_path / "plain", None)
    exact, exact_weights = train_digits(tmp_path / "exact", {"level": "exact"})
    assert exact == plain
    assert all(torch.equal(weights[name], exact_weights[name]) for name in weights)
    rounded, rounded_weights = train_digits(tmp_path / "L2", {"level": "L2", "adapt_interval": 4, "min_numel": 256})
    assert rounded["losses"][0] == plain["losses"][0]  # the forward is untouched
    assert any(not torch.equal(weights[name], rounded_weights[name]) for name in weights)
    assert rounded["losses"][-1] < rounded["losses"][0]  # how far the gradient may be off: test_modes.py, ZeRO-2
