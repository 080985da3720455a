"""FSDP2 (fully_shard) with compressed activations: `attach(...).follow()` is all that is new.

torchrun --nproc-per-node 2 examples/minimal_fsdp2.py     (one process for each GPU; without a GPU, on the CPU)
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import cross_entropy

import gact_dist

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
torch.manual_seed(0)  # fully_shard takes the weights as they are: the same on all ranks
blocks = [Sequential(Linear(64, 512), GELU()), Sequential(Linear(512, 512), GELU()), Linear(512, 10)]
model = fully_shard(Sequential(*[fully_shard(block.to(device)) for block in blocks]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gact = gact_dist.attach(model, level="L2").follow()  # every forward of the model is a step
torch.manual_seed(dist.get_rank())  # and data of its own on each
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
dist.destroy_process_group()
