"""The largest batch that fits: untouched, with level L2, with gradient checkpointing, and with both.

python -m examples.largest_batch --limit-mb 75

Each method is measured at two batches. The line through the two peaks nearest to the limit says which batch to try
next, until one is found whose peak is just below it. Peaks are those of the whole process above what it held before the
model was made: weights, gradients, optimizer state and activations. Every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import gact_dist
from examples.train.peak_memory import MEASURED_STEPS, PeakMemory

METHODS = ("untouched", "L2", "checkpointing", "checkpointing + L2", "checkpointing + L2, recomputed")
WIDTH, HEADS, LAYERS, LENGTH, WORDS = 128, 4, 8, 64, 256
MARGIN = 0.97  # of the limit is aimed at: peaks differ from run to run by some percent
CLOSE_ENOUGH = 0.93  # of the limit
MEASUREMENTS = 7  # of a method, at the most
LARGEST_STEP = 4  # times the largest batch so far


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same."""
        split = self.queries(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        mixed = scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """A small GPT whose blocks are recomputed in backward if `checkpointed`."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, words]."""
        x = self.words(tokens) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def measure(method: str, batch: int) -> dict[str, float]:
    """Train some steps in this process: their peak, the CPU time of one, and what is kept for backward."""
    torch.manual_seed(0)
    Model(True)(torch.zeros(1, LENGTH, dtype=torch.long)).sum().backward()  # loads kernels, which stay in memory
    memory = PeakMemory(torch.device("cpu"))
    model = Model("checkpointing" in method)
    optimizer = torch.optim.AdamW(model.parameters())
    gact = gact_dist.attach(model, "L2", recomputed="recomputed" in method) if "L2" in method else None

    def loss_fn(tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    times_s = []
    for _ in range(MEASURED_STEPS if gact else 2):  # the first adaptation is among them
        tokens = torch.randint(WORDS, (batch, LENGTH))
        start_s = time.process_time()
        with gact.step(loss_fn, tokens) if gact else nullcontext():
            loss = loss_fn(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.process_time() - start_s)
        memory.end_step()
    counted = gact or gact_dist.attach(model, level="exact")
    with counted.step():
        loss_fn(tokens)
    retained_bytes = counted.report().retained_bytes
    return {"peak_mb": max(memory.steps_bytes) / 1e6, "step_cpu_s": min(times_s), "retained_mb": retained_bytes / 1e6}


def in_a_process(method: str, batch: int) -> dict[str, float]:
    """measure() in a process of its own."""
    command = [sys.executable, "-m", "examples.largest_batch", "--method", method, "--batch", str(batch)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def next_batch(peaks_mb: dict[int, float], limit_mb: float) -> int:
    """The batch at which the line through the two measured peaks that are nearest to the limit meets it."""
    small, large = sorted(sorted(peaks_mb, key=lambda batch: abs(peaks_mb[batch] - limit_mb))[:2])
    slope_mb = max((peaks_mb[large] - peaks_mb[small]) / (large - small), 1e-3)
    batch = int(small + (MARGIN * limit_mb - peaks_mb[small]) / slope_mb)
    return max(1, min(batch, LARGEST_STEP * max(peaks_mb)))


def largest(method: str, batches: list[int], limit_mb: float) -> str:
    """One row of the table."""
    found = {batch: in_a_process(method, batch) for batch in batches}
    for _ in range(MEASUREMENTS - len(batches)):
        fitting = max((batch for batch in found if found[batch]["peak_mb"] <= limit_mb), default=0)
        if fitting and found[fitting]["peak_mb"] >= CLOSE_ENOUGH * limit_mb:
            break
        batch = next_batch({batch: found[batch]["peak_mb"] for batch in found}, limit_mb)
        if batch in found:
            break
        found[batch] = in_a_process(method, batch)
    best = max((batch for batch in found if found[batch]["peak_mb"] <= limit_mb), default=0)
    if best == 0:
        return f"| {method} | none | | | |"
    measured = found[best]
    cpu_ms = 1000 * measured["step_cpu_s"] / best
    return f"| {method} | {best} | {measured['peak_mb']:.0f} | {measured['retained_mb']:.0f} | {cpu_ms:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-mb", type=float, default=75)
    parser.add_argument("--batches", type=int, nargs=2, default=[8, 32], help="the two to begin with")
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--batch", type=int)
    options = parser.parse_args()
    if options.batch is not None:
        print(json.dumps(measure(options.method, options.batch)))
        return
    print("| method | largest batch | peak, MB | retained, MB | CPU ms for an example |\n|---|---|---|---|---|")
    for method in [options.method] if options.method else METHODS:
        print(largest(method, options.batches, options.limit_mb), flush=True)


if __name__ == "__main__":
    main()
