"""Activation checkpointing with compressed block inputs: `attach(...).follow()` is all that is new.

torchrun --nproc-per-node 2 examples/minimal_checkpoint.py     (one process for each GPU; without a GPU, on the CPU)
"""

import gc

import torch
import torch.distributed as dist
from torch.nn import GELU, LayerNorm, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gact_dist


class Block(Sequential):
    def forward(self, hidden):  # keeps this input for backward, and computes the rest again
        return checkpoint(super().forward, hidden, use_reentrant=False)


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
torch.manual_seed(dist.get_rank())
blocks = [Block(LayerNorm(64), Linear(64, 256), GELU(), Linear(256, 64)) for _ in range(4)]
model = DistributedDataParallel(Sequential(*blocks).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gact = gact_dist.attach(model, level="L2").follow()  # every forward of the model is a step
for step in range(20):
    batch = torch.randn(256, 64, device=device)
    loss = cross_entropy(model(batch), batch[:, :10].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(str(gact.report()).splitlines()[-1])
del model, gact  # gloo may abort the process when a reducer outlives its group
gc.collect()
dist.destroy_process_group()
