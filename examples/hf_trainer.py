"""The Trainer of transformers, whose loop is not ours: `attach(model).follow()` before the Trainer gets the model.

torchrun --nproc-per-node 2 examples/hf_trainer.py [--gradient-checkpointing | --zero-3] [--level L2] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import deepspeed
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import gact_dist

ZERO_3 = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}}


class Sentences(torch.utils.data.Dataset):
    """Random token numbers; the label is the parity of the first one."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(5, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(32, dtype=torch.long), "labels": tokens[0] % 2}


def make_model() -> BertForSequenceClassification:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    return BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=64, **sizes))


def train(options: argparse.Namespace) -> None:
    set_seed(3)
    model = make_model()
    settings = gact_dist.Config.from_level(options.level, adapt_interval=2, min_numel=16)
    gact = gact_dist.attach(model, config=settings).follow()
    on_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(options.out), max_steps=4, per_device_train_batch_size=8, report_to=[], save_strategy="no",
        use_cpu=on_cpu, ddp_backend="gloo" if on_cpu else "nccl", ddp_find_unused_parameters=False,
        disable_tqdm=True, logging_steps=1, gradient_checkpointing=options.gradient_checkpointing,
        deepspeed=ZERO_3 if options.zero_3 else None,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=Sentences()).train()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters) if options.zero_3 else nullcontext():
        weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)).hexdigest()
    if torch.distributed.get_rank() == 0:
        print(str(gact.report()).splitlines()[-1])
        found = {"weights": weights}
        found |= {"plan": gact.plan, "ratio": gact.report().ratio}
        found |= {"quantised": sum(row.codec == "quantised" for row in gact.report().rows)}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--level", default="L2")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--zero-3", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/hf_trainer"))
    train(parser.parse_args())
    gc.collect()  # gloo aborts the process when a reducer outlives its group
    torch.distributed.destroy_process_group()
