"""The Trainer of transformers with compressed activations: the import and `add_callback` are all that is new.

torchrun --nproc-per-node 2 examples/hf_trainer.py [any option of TrainingArguments, such as --bf16 or --max_steps 20]

One process for each GPU; without a GPU, on the CPU.
"""

import gc
import logging

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

from gact_dist.integrations.transformers import GactCallback


class Sentences(torch.utils.data.Dataset):
    """Random token numbers; the label is the parity of the first one."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        tokens = torch.randint(5, 100, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones(32, dtype=torch.long), "labels": tokens[0] % 2}


logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
parser = HfArgumentParser(TrainingArguments)
parser.set_defaults(output_dir="runs/hf_trainer", max_steps=8, per_device_train_batch_size=8, logging_steps=1)
parser.set_defaults(report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available())
(arguments,) = parser.parse_args_into_dataclasses()
set_seed(3)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=64, **sizes))
trainer = Trainer(model=model, args=arguments, train_dataset=Sentences())
trainer.add_callback(GactCallback(trainer, "L2"))
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
del trainer, model  # gloo may abort the process when a reducer outlives its group
gc.collect()
if torch.distributed.is_initialized():  # not in a single process
    torch.distributed.destroy_process_group()
