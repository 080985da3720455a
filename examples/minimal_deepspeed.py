"""DeepSpeed with compressed activations: `gact_dist.deepspeed` and the "gact" block are all that is new.

deepspeed --num_gpus 2 examples/minimal_deepspeed.py
DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 examples/minimal_deepspeed.py     (without a GPU)
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn import GELU, Linear, Sequential
from torch.nn.functional import cross_entropy

import gact_dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)  # the launcher adds it
parser.parse_args()
config = {
    "train_micro_batch_size_per_gpu": 256,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "gact": {"level": "L2"},
}
model = Sequential(Linear(64, 512), GELU(), Linear(512, 512), GELU(), Linear(512, 10))
engine, *_ = gact_dist.deepspeed.initialize(model=model, config=config)
torch.manual_seed(dist.get_rank())
for step in range(20):
    batch = torch.randn(256, 64, device=engine.device)
    loss = cross_entropy(engine(batch), batch[:, :10].argmax(dim=1))
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
if dist.get_rank() == 0:
    print(str(engine.gact.report()).splitlines()[-1])
engine.destroy()
dist.destroy_process_group()
