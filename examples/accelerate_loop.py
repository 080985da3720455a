"""A loop with accelerate and compressed activations: the import and `attach(...).follow()` are all that is new.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py [--accumulate 2] [--mixed_precision bf16]

Without a GPU as well: the script asks for the CPU. `accelerate launch --cpu` starts a single process unless it has MPI.
"""

import argparse
import logging

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import set_seed
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gact_dist


class Printer(GeneralTracker):
    """In place of "wandb" or "tensorboard"."""

    name, requires_logging_directory, tracker = "printer", False, None

    def store_init_configuration(self, values):
        """Settings are not printed."""

    def log(self, values, step, **kwargs):
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--mixed_precision")
options = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
set_seed(3)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), mixed_precision=options.mixed_precision,
    gradient_accumulation_steps=options.accumulate, log_with=Printer(),
)  # fmt: skip
accelerator.init_trackers("accelerate_loop")
inputs = torch.randn(2048, 64)
loader = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), 64)
model = Sequential(Linear(64, 512), GELU(), Linear(512, 512), GELU(), Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
gact = gact_dist.attach(model, level="L2").follow()  # every forward of the model is a step
for step, (batch, labels) in zip(range(options.steps), loader, strict=False):
    with accelerator.accumulate(model):
        loss = cross_entropy(model(batch), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    values = {"loss": loss.item()}
    values |= gact.scalars()
    accelerator.log(values, step=step)
accelerator.end_training()
