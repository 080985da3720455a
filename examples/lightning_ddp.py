"""Lightning with compressed activations: the import and the callback are all that is new.

torchrun --nproc-per-node 2 examples/lightning_ddp.py     (one process for each GPU; without a GPU, on the CPU)
python examples/lightning_ddp.py --devices 1 [--accumulate 2]
"""

import argparse
import logging

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gact_dist.integrations.lightning import GactCallback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = cross_entropy(self.network(inputs), labels)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--resume", help="a checkpoint")
parser.add_argument("--out", default="runs/lightning_ddp")
options = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
lightning.seed_everything(3)
inputs = torch.randn(2048, 64)
trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=options.devices,
    strategy="ddp" if options.devices > 1 else "auto",
    max_steps=options.steps,
    accumulate_grad_batches=options.accumulate,
    log_every_n_steps=1,
    logger=CSVLogger(options.out, name="", version=""),
    callbacks=[GactCallback("L2")],
)
module = Classifier()
trainer.fit(module, DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(dim=1)), 64), ckpt_path=options.resume)
