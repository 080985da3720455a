"""A loop in the manner of torchtitan with compressed activations: `attach(...).follow()` is all that is new.

torchrun --nproc-per-node 2 examples/torchtitan_like.py [--tensor-parallel 2] [--accumulate 2]

A device mesh, tensor parallelism within it, activation checkpointing and FSDP2 block by block, gradient accumulation
and clipping. One process for each GPU; without a GPU, on the CPU.
"""

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import gact_dist

WIDTH, HEADS, VOCABULARY, LENGTH = 64, 4, 256, 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        output = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(output.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model, mesh, checkpointing):
    plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel()}
    for name, layer in model.layers.items():
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], plan)
        if checkpointing:
            model.layers[name] = layer = checkpoint_wrapper(layer)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def clip(parameters, longest):
    """As clip_grad_norm_, which takes gradients of one device mesh only."""
    gradients = [parameter.grad for parameter in parameters]
    length = sum(gradient.norm().full_tensor().item() ** 2 for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, longest / (length + 1e-6)))


parser = argparse.ArgumentParser()
parser.add_argument("--tensor-parallel", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1, help="batches for each optimizer step")
parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing of each block")
parser.add_argument("--steps", type=int, default=16)
options = parser.parse_args()
logging.basicConfig(format="%(message)s")
logging.getLogger("gact_dist").setLevel(logging.INFO)  # one line at attach, and one for each adaptation
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
data_parallel = dist.get_world_size() // options.tensor_parallel
mesh = init_device_mesh(device, (data_parallel, options.tensor_parallel), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = parallelize(Transformer().to(device), mesh, options.checkpoint)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
gact = gact_dist.attach(model, level="L2", process_group=mesh["dp"]).follow()
torch.manual_seed(mesh["dp"].get_local_rank())  # the ranks of a tensor-parallel group have the same data
losses = []
for step in range(options.steps):
    for _ in range(options.accumulate):
        tokens = (torch.randint(0, VOCABULARY, (8, 1), device=device) + torch.arange(LENGTH + 1, device=device)) % 256
        logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / options.accumulate
        loss.backward()
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item() * options.accumulate)
    values = {"loss": losses[-1]}
    values |= gact.scalars()
    if dist.get_rank() == 0:
        print(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
dist.destroy_process_group()
