"""A training script as users of transformers' Trainer have it; the lines of gact_dist are the two in the middle.

Run by test_trainer.py under torchrun: python trainer_job.py OUTPUT plain|gradient_checkpointing|zero_3 LEVEL ...
It trains anew for each level, as starting takes longer than training, and writes what it found to OUTPUT/LEVEL.json.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Sentences(torch.utils.data.Dataset):
    """Random token numbers; the label is the parity of the first one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(5, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(32, dtype=torch.long), "labels": tokens[0] % 2}


ZERO_3 = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}}


def train(output: str, kind: str, level: str) -> None:
    set_seed(3)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=64, **sizes))
    gact = None
    if level != "off":
        import gact_dist

        gact = gact_dist.attach(model, config=gact_dist.Config.from_level(level, adapt_interval=2, min_numel=16))
        gact.follow()
    arguments = TrainingArguments(
        output_dir=output, max_steps=4, per_device_train_batch_size=8, use_cpu=True, ddp_backend="gloo", report_to=[],
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=kind == "gradient_checkpointing",
        ddp_find_unused_parameters=False, deepspeed=ZERO_3 if kind == "zero_3" else None,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if kind == "zero_3" else nullcontext():
        weights = b"".join(p.detach().numpy().tobytes() for p in parameters)
    if int(os.environ["RANK"]) == 0:
        found = {"weights": hashlib.sha256(weights).hexdigest(), "ratio": 1.0, "plan": 0, "quantised": 0}
        if gact is not None:
            report = gact.report()
            quantised = sum(row.codec == "quantised" for row in report.rows)
            found |= {"ratio": report.ratio, "plan": len(gact.plan), "quantised": quantised}
        Path(output, f"{level}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    folder, kind_of_job, *levels = sys.argv[1:]
    for name in levels:
        train(folder, kind_of_job, name)
    gc.collect()  # gloo aborts the process when a reducer outlives its group
    torch.distributed.destroy_process_group()
