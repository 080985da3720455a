"""Memory under torch.compile: hooks around compiled regions against hooks inlined into their graphs.

    python -m benchmarks.step.bench_compile --json benchmarks/results/compile.json

A GPT whose blocks are compiled one by one, or which is compiled whole; each way in a process of its own. Retained bytes
are the report's; the peak is the resident set's high-water mark in a step, above what the process held before it
(weights and gradients), the least of a few steps after compilation. "untouched" has no hooks at all.
"""

import argparse
import ctypes
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import gact_dist
from examples.train.peak_memory import PeakMemory

FORMS = ("untouched", "eager", "inlined")
# glibc gives freed tensors back at once from the start, or what compilation has left would hide the peak
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
WIDTH, LAYERS, HEADS, VOCABULARY, BATCH, LENGTH = 256, 6, 4, 512, 16, 128


class Block(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def measure(backend: str, what: str, form: str, steps: int) -> dict:
    """One way, in this process."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    for module in blocks if what == "blocks" else [model]:
        module.compile(backend=backend)
    config = None if form == "untouched" else gact_dist.Config(policy="uniform", bits=4, compile_hooks=form)
    gact = gact_dist.attach(model, level="L0") if config is None else gact_dist.attach(model, config=config)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))

    def step() -> None:
        with gact.step():
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()

    for _ in range(2):  # compiles, learns the roles, makes the gradients
        step()
    ctypes.CDLL(None).malloc_trim(0)
    memory = PeakMemory(torch.device("cpu"))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
        memory.end_step()
    report = gact.report()
    return {
        "backend": backend, "what": what, "form": form, "exact_bytes": report.exact_bytes,
        "retained_bytes": report.retained_bytes, "peak_bytes": min(memory.steps_bytes), "step_s": min(times),
    }  # fmt: skip


def main() -> None:
    """Run every way in a process of its own and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["aot_eager", "inductor"])
    parser.add_argument("--what", nargs="+", default=["blocks", "whole"], choices=["blocks", "whole"])
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--here", action="store_true", help="measure the one way that is given, in this process")
    options = parser.parse_args()
    ways = [(backend, what, form) for backend in options.backend for what in options.what for form in options.form]
    if options.here:
        print(json.dumps(measure(*ways[0], options.steps)))
        return
    results = []
    for backend, what, form in ways:
        command = [sys.executable, "-m", "benchmarks.step.bench_compile", "--here", "--steps", str(options.steps)]
        command += ["--backend", backend, "--what", what, "--form", form]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **_ALLOCATOR})
        results.append(json.loads(done.stdout))
        found = results[-1]
        sizes = ", ".join(f"{key} {found[f'{key}_bytes'] / 2**20:.1f} MiB" for key in ("exact", "retained", "peak"))
        print(f"{backend}, {what}, {form}: {sizes}, step {found['step_s']:.2f} s", flush=True)
    if options.json:
        # the other ways of an earlier run stay, so that a shared machine can be asked a few minutes at a time
        earlier = json.loads(options.json.read_text())["results"] if options.json.is_file() else []
        results = [r for r in earlier if (r["backend"], r["what"], r["form"]) not in ways] + results
        where = {"date": str(datetime.date.today()), "torch": torch.__version__, "machine": platform.processor()}
        options.json.write_text(json.dumps({**where, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
