"""DistributedDataParallel with compressed activations: `attach` and `with gact.step(...)` are all that is new.

torchrun --nproc-per-node 2 examples/minimal_ddp.py     (one process for each GPU; without a GPU, on the CPU)
"""

import gc

import torch
import torch.distributed as dist
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gact_dist

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
torch.manual_seed(dist.get_rank())
model = Sequential(Linear(64, 512), GELU(), Linear(512, 512), GELU(), Linear(512, 10)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gact = gact_dist.attach(model, level="L2")


def loss_fn(batch):
    return cross_entropy(model(batch), batch[:, :10].argmax(dim=1))


for step in range(20):
    batch = torch.randn(256, 64, device=device)
    with gact.step(loss_fn, batch):
        loss = loss_fn(batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(str(gact.report()).splitlines()[-1])
model = gact = None  # gloo may abort the process when a reducer outlives its group
gc.collect()
dist.destroy_process_group()
