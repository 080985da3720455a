"""A small GPT on the bytes of a text file: DDP, bf16 autocast, gradient accumulation, checkpoints to resume from.

The lines with `gact` are all that compression adds to such a script.

torchrun --nproc-per-node 2 examples/train_gpt.py --data README.md --out runs/gpt [--resume] [--compile]
"""

import argparse
import gc
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gact_dist

parser = argparse.ArgumentParser()
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--iterations", type=int, default=6)
parser.add_argument("--save-every", type=int, default=3)
args = parser.parse_args()
args.out.mkdir(parents=True, exist_ok=True)

# model
n_layer, n_head, n_embd, block_size, dropout = 2, 4, 64, 64, 0.1
# training
batch_size, accumulation, learning_rate, warmup, grad_clip = 4, 2, 3e-3, 2, 1.0
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


ddp = "RANK" in os.environ
if ddp and device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if ddp:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world_size = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)
master = rank == 0
torch.manual_seed(1337)
data = torch.frombuffer(bytearray(args.data.read_bytes()), dtype=torch.uint8)


def get_batch(iteration, micro_step):
    generator = torch.Generator().manual_seed((iteration * accumulation + micro_step) * world_size + rank)
    starts = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    rows = torch.stack([data[i : i + block_size + 1] for i in starts.tolist()]).long().to(device)
    return rows[:, :-1], rows[:, 1:]


def get_lr(iteration):
    if iteration < warmup:
        return learning_rate * (iteration + 1) / warmup
    return learning_rate * 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / max(1, args.iterations - warmup)))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
raw_model = model
if args.compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model)
gact = gact_dist.attach(model, level="L2").follow()

first = 0
if args.resume:
    checkpoint = torch.load(args.out / "ckpt.pt", map_location=device)
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    gact.load_state_dict(checkpoint["gact"])
    first = checkpoint["iteration"]

losses, norms = [], []
for iteration in range(first, args.iterations):
    torch.manual_seed(1000 * iteration + rank)
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    total = 0.0
    for micro_step in range(accumulation):
        last = micro_step == accumulation - 1
        x, y = get_batch(iteration, micro_step)
        with model.no_sync() if ddp and not last else nullcontext():
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x, y) / accumulation
            loss.backward()
        total += loss.item()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), grad_clip).item())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(total)
    if master:
        print(f"iteration {iteration}: loss {total:.4f}, gradient norm {norms[-1]:.3f}")
    if master and (iteration + 1) % args.save_every == 0:
        checkpoint = {
            "model": raw_model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration + 1,
            "gact": gact.state_dict(),
        }
        torch.save(checkpoint, args.out / "ckpt.pt")
        torch.save(checkpoint, args.out / f"ckpt-{iteration + 1}.pt")
if master:
    print(str(gact.report()).splitlines()[-1])
    (args.out / "log.json").write_text(json.dumps({"losses": losses, "norms": norms}))
if ddp:
    del model, raw_model, optimizer
    gc.collect()  # gloo aborts the process when a reducer outlives its group
    dist.destroy_process_group()
