"""The larger example scripts: bitwise the untouched job at level exact, and real bits at L2, on two ranks.

The untouched job is the script without the lines that have `gact` in them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from script_ranks import run_script

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / ".cache" / "data" / "mnist_5k.csv.gz"


def changed(name: str, changes: dict[str, str], folder: Path) -> Path:
    """The script in a folder of its own, each text in it replaced by another; every text must be there once."""
    text = (ROOT / "examples" / name).read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(text)
    return script


def untouched(name: str, changes: dict[str, str], folder: Path) -> Path:
    """The script as it was before gact_dist."""
    script = changed(name, changes, folder)
    lines = script.read_text().splitlines(keepends=True)
    script.write_text("".join(line for line in lines if "gact" not in line))
    return script


def same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


# -- a GPT in one file: DDP, accumulation under no_sync, bf16 autocast, clipping, checkpoints -------------------------

ACCUMULATION = 2


def at_level(level: str) -> dict[str, str]:
    """Adaptations within the few steps of a test, and two more values in the checkpoint for the test to see."""
    return {
        'level="L2"': f'config=gact_dist.Config.from_level("{level}", adapt_interval=4, min_numel=16)',
        '            "gact": gact.state_dict(),\n': (
            '            "gact": gact.state_dict(),\n'
            '            "variance": getattr(gact.adaptation, "predicted_variance", None),\n'
            '            "ratio": gact.report().ratio,\n'
        ),
    }


# inductor would take a minute, and two layers twice the time of one
QUICKLY = {
    "torch.compile(model)": 'torch.compile(model, backend="aot_eager")',
    "block_size, dropout = 2, 4,": "block_size, dropout = 1, 4,",
}


def train_gpt(script: Path, *arguments: str) -> dict:
    run_script(script, "--data", ROOT / "README.md", "--out", script.parent, *arguments)
    return json.loads((script.parent / "log.json").read_text())


def saved(folder: Path, name: str = "ckpt.pt") -> dict:
    return torch.load(folder / name)


def test_a_gpt_script(tmp_path):
    name = "train_gpt.py"
    plain = train_gpt(untouched(name, {}, tmp_path / "plain"))
    exact = train_gpt(changed(name, at_level("exact"), tmp_path / "exact"))
    assert exact == plain
    assert same_weights(saved(tmp_path / "exact")["model"], saved(tmp_path / "plain")["model"])

    rounded = train_gpt(changed(name, at_level("L2"), tmp_path / "L2"))
    final = saved(tmp_path / "L2")
    assert final["ratio"] > 2.5  # bfloat16 to 4 bits, and the float32 log-softmax as it is
    assert rounded["losses"][0] == plain["losses"][0]  # the forward is untouched
    assert rounded["losses"] != plain["losses"]
    # In the first iteration the weights are still the same, so its gradient is g + e, and its norm is off by |e| at
    # most. |e|^2 is a micro-batch's predicted variance (that of one rank) times their number, over the ranks; the first
    # micro-batch, with bits that are uniform yet, may have several times more. 4 bits are good for a factor of 2.
    error = (2 * (1 + 3) * saved(tmp_path / "L2", "ckpt-3.pt")["variance"] / 2) ** 0.5
    assert 0 < abs(rounded["norms"][0] - plain["norms"][0]) < error < plain["norms"][0]

    resumed_script = changed(name, at_level("L2"), tmp_path / "resumed")
    shutil.copy(tmp_path / "L2" / "ckpt-3.pt", tmp_path / "resumed" / "ckpt.pt")
    resumed = train_gpt(resumed_script, "--resume")
    assert resumed["losses"] == rounded["losses"][3:]
    assert same_weights(saved(tmp_path / "resumed")["model"], final["model"])


@pytest.mark.large
def test_a_compiled_gpt_script(tmp_path):
    name = "train_gpt.py"
    plain = train_gpt(untouched(name, QUICKLY, tmp_path / "plain"), "--compile")
    exact = train_gpt(changed(name, QUICKLY | at_level("exact"), tmp_path / "exact"), "--compile")
    rounded = train_gpt(changed(name, QUICKLY | at_level("L2"), tmp_path / "L2"), "--compile")
    assert exact == plain
    assert same_weights(saved(tmp_path / "exact")["model"], saved(tmp_path / "plain")["model"])
    assert rounded["losses"][0] == plain["losses"][0]
    assert saved(tmp_path / "L2")["ratio"] > 2  # as in test_a_gpt_script, with casts of the weights


# -- DeepSpeed: args, a JSON file, training_data, the engine's own loader --------------------------------------------


def train_digits(script: Path, block: dict | None) -> tuple[dict, dict]:
    """(log, weights), under ZeRO-2."""
    folder = script.parent
    config = {
        "train_batch_size": 128,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        **({} if block is None else {"gact": block}),
    }
    (folder / "ds_config.json").write_text(json.dumps(config))
    run_script(script, "--deepspeed", "--deepspeed_config", folder / "ds_config.json", "--data", DATA, "--out", folder)
    return json.loads((folder / "log.json").read_text()), torch.load(folder / "model.pt")


@pytest.mark.large
def test_a_deepspeed_script(tmp_path):
    name = "train_digits.py"
    as_it_was = {"gact_dist.deepspeed.initialize(": "deepspeed.initialize("}
    plain, weights = train_digits(untouched(name, as_it_was, tmp_path / "plain"), None)
    exact, exact_weights = train_digits(changed(name, {}, tmp_path / "exact"), {"level": "exact"})
    assert exact == plain
    assert same_weights(weights, exact_weights)
    settings = {"level": "L2", "adapt_interval": 4, "min_numel": 256}
    rounded, rounded_weights = train_digits(changed(name, {}, tmp_path / "L2"), settings)
    assert rounded["losses"][0] == plain["losses"][0]  # the forward is untouched
    assert not same_weights(weights, rounded_weights)
    assert rounded["losses"][-1] < rounded["losses"][0]  # how far the gradient may be off: test_modes.py, ZeRO-2
