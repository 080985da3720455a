"""Every form in which DeepSpeed takes its config brings the "gact" block with it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from small_models import TinyGPT

import gact_dist

SETTINGS = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
WITH_BLOCK = SETTINGS | {"gact": {"bits": 3}}


def commented(settings: dict[str, Any]) -> str:
    return "# what this job trains with\n" + json.dumps(settings, indent=1).replace("{", "{ // a comment", 1)


def encoded(settings: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()


def bits_of(folder: str, arguments: dict[str, Any]) -> float | None:
    """The block's bits as the engine's controller has them, started in a folder; None where there is no controller."""
    os.environ["DS_ACCELERATOR"], os.environ["LOCAL_RANK"] = "cpu", str(dist.get_rank())
    with contextlib.chdir(folder):
        engine, *_ = gact_dist.deepspeed.initialize(model=TinyGPT(), **arguments)
    gact = getattr(engine, "gact", None)
    if gact is not None:
        gact.detach()
    engine.destroy()
    return None if gact is None else gact.config.bits


@pytest.mark.parametrize(
    ("text", "arguments", "bits"),
    [
        (json.dumps(WITH_BLOCK), {"config": "ds_config.json"}, 3),
        (json.dumps(WITH_BLOCK), {"config_params": "ds_config.json"}, 3),
        (json.dumps(WITH_BLOCK), {"args": SimpleNamespace(deepspeed_config="ds_config.json")}, 3),
        (json.dumps(WITH_BLOCK), {"args": SimpleNamespace(deepscale_config="ds_config.json")}, 3),
        (commented(WITH_BLOCK), {"config": "ds_config.json"}, 3),
        (commented(SETTINGS), {"config": "ds_config.json"}, None),
        ("", {"config": encoded(WITH_BLOCK)}, 3),
        ("", {"config": encoded(SETTINGS)}, None),
        ("", {"config": WITH_BLOCK}, 3),
    ],
    ids=[
        "path",
        "config_params",
        "args",
        "old args",
        "comments",
        "comments, no block",
        "base64",
        "no block",
        "mapping",
    ],
)
def test_a_config_is_read_as_deepspeed_reads_it(ranks, tmp_path, text, arguments, bits):
    (tmp_path / "ds_config.json").write_text(text)
    assert ranks(bits_of, str(tmp_path), arguments) == [bits, bits]


def test_what_is_no_config_is_left_for_deepspeed_to_refuse(ranks, tmp_path):
    with pytest.raises(ValueError, match="Expected a string path to an existing deepspeed config"):
        ranks(bits_of, str(tmp_path), {"config": "no_such_file.json"})
