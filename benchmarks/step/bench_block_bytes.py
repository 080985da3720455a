"""How many bytes does a transformer block keep for backward, for each token and unit of its width?

    python -m benchmarks.step.bench_block_bytes --json benchmarks/results/block_bytes.json
    python -m benchmarks.step.bench_block_bytes --table benchmarks/results/block_bytes.json

Four variants of the block of Llama 3 in bfloat16 (RMS norm as transformers writes it, by way of float32, or torch's;
keys and values repeated for all heads, or left to attention), and that of a GPT with and without dropout. Three such
blocks train for a few steps, untouched and at each level, with and without Config.derive; levels that adapt have done
so. Two figures for each, over the blocks alone:

    report    what gact.report() says of tensors that are saved in blocks
    counted   bytes that torch's allocator has given out and not got back, from the end of the first block's forward to
              that of the last one's, whose input and output are of one size

The second knows nothing of gact_dist. "variance" is the variance of the gradient that a level predicts, in units of
what the same level predicts where it stores all: bytes that are gained are not to be lost there. "measured" is the same
of the mean squared distance from the exact gradient over some roundings. A level gives the bits of what it derives to
what it stores, and so has less variance; "equal variance" is the smallest number of bits, in steps of a tenth, with
which it is predicted to have no more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import gact_dist
from benchmarks.adaptation.bench_adaptation import processor
from benchmarks.step.bench_peak import events_of
from gact_dist import Config

BATCH, TOKENS, LAYERS = 2, 128, 3
WIDTH, HEADS, KV_HEADS, MLP_WIDTH = 512, 8, 2, 1792
HEAD_WIDTH = WIDTH // HEADS
TYPE = torch.bfloat16
UNTOUCHED = "untouched"
LEVELS = {"L2": 4.0, "L2.1": 3.0}
"""with their bits"""
ROUNDINGS = 12


class NormByTransformers(nn.Module):
    """The RMS norm of transformers' Llama: its operators one by one, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, HEAD_WIDTH)).transpose(1, 2)


class LlamaBlock(nn.Module):
    """Of the shape of Llama 3: grouped queries, rotary embeddings, a gated MLP of 3.5 times the width."""

    def __init__(self, norm: Callable[[], nn.Module], repeats: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.repeats = norm(), norm(), repeats
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, MLP_WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k = (_rotated(_heads(part(y), -1), cos, sin) for part in (self.q, self.k))
        v = _heads(self.v(y), KV_HEADS)
        if self.repeats:
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeats)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPTBlock(nn.Module):
    """Layer norms, attention and an MLP of four times the width, with dropout as in GPT-2 or without."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), dropout
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (_heads(part, HEADS) for part in self.qkv(self.norm1(x)).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.o(y), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Llama, transformers' norm, repeated keys": lambda: LlamaBlock(NormByTransformers, True),
    "Llama, transformers' norm, grouped queries": lambda: LlamaBlock(NormByTransformers, False),
    "Llama, torch's norm, repeated keys": lambda: LlamaBlock(lambda: nn.RMSNorm(WIDTH), True),
    "Llama, torch's norm, grouped queries": lambda: LlamaBlock(lambda: nn.RMSNorm(WIDTH), False),
    "GPT, dropout 0.1": lambda: GPTBlock(0.1),
    "GPT, no dropout": lambda: GPTBlock(0.0),
}


class Model(nn.Module):
    """Blocks between a linear layer and a loss; cos and sin are buffers, as in a model."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, 1)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.rand(TOKENS, HEAD_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> loss."""
        x = self.first(x)
        for block in self.blocks:
            with record_function(_BLOCK):
                x = block(x, self.cos, self.sin)
        return self.last(x).float().square().mean()


_BLOCK = "bench_block_bytes block"


def counted_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that are there once the last block has run and were not once the first had."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = model(x)
    loss.backward()
    events = events_of(profiler)
    ends = [event.end_time_ns for event in events if event.name == _BLOCK]
    allocations = [event for event in events if event.tag == _EventType.Allocation]

    def live_bytes(time_ns: int) -> int:
        latest = max((event for event in allocations if event.start_time_ns <= time_ns), key=lambda e: e.start_time_ns)
        total: int = latest.extra_fields.total_allocated
        return total

    return live_bytes(ends[-1]) - live_bytes(ends[0])


def squared_error(model: nn.Module, x: Tensor, gact: gact_dist.Controller) -> float:
    """Mean squared distance of the gradient from the exact one, with the same dropout in all."""
    parameters = [*model.parameters()]

    def gradient(context: Any) -> Tensor:
        torch.manual_seed(1)
        with context:
            loss = model(x)
        return torch.cat([found.float().flatten() for found in torch.autograd.grad(loss, parameters)])

    exact = gradient(nullcontext())
    return sum(float((gradient(gact.step()) - exact).square().sum()) for _ in range(ROUNDINGS)) / ROUNDINGS


def measure(block: Callable[[], nn.Module], config: Config | None = None) -> dict[str, float]:
    """The figures of one kind of block, untouched or under some settings."""
    torch.manual_seed(0)
    model, x = Model(block).to(TYPE), torch.randn(BATCH, TOKENS, WIDTH).to(TYPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    unit = BATCH * TOKENS * WIDTH * (LAYERS - 1)
    counted_bytes(model, x)  # what the first run leaves behind is not counted
    if config is None:
        return {"counted": counted_bytes(model, x) / unit}
    gact = gact_dist.attach(model, config=config)
    while not gact.history:
        optimizer.zero_grad()
        with gact.step(model, x):
            loss = model(x)
        loss.backward()
        optimizer.step()
    with gact.step(model, x):
        counted = counted_bytes(model, x)
    measured = squared_error(model, x, gact)
    report = gact.report()
    blocks = tuple(f"blocks.{number}{end}" for number in range(1, LAYERS) for end in ".:")
    return {
        "counted": counted / unit,
        "report": sum(row.bytes for row in report.rows if row.name.startswith(blocks)) / unit,
        "bits": gact.history[-1]["average_bits"],
        "variance": gact.history[-1]["predicted_variance"],
        "measured": measured,
    }


def rows_of(name: str) -> list[dict[str, Any]]:
    """All settings on one kind of block."""
    rows: list[dict[str, Any]] = [{"block": name, "setting": UNTOUCHED, **measure(BLOCKS[name])}]
    for level, bits in LEVELS.items():
        stored = measure(BLOCKS[name], Config.from_level(level, derive=False))
        found = {f"{level}, all stored": stored, level: measure(BLOCKS[name], Config.from_level(level))}
        for tenths in range(1, 11):
            fewer = measure(BLOCKS[name], Config.from_level(level, bits=bits - tenths / 10))
            if fewer["variance"] > stored["variance"]:
                break
            found[f"{level}, equal variance"] = fewer
        rows += [
            {"block": name, "setting": setting, **row, **{of: row[of] / stored[of] for of in ("variance", "measured")}}
            for setting, row in found.items()
        ]
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown: bytes as they are counted, in brackets the variance as it is predicted and as it is measured."""
    cells = {(row["block"], row["setting"]): row for row in rows}
    settings = list(dict.fromkeys(setting for _, setting in cells))
    lines = [f"| block | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
    for block in dict.fromkeys(block for block, _ in cells):
        texts = [_text(cells[block, setting]) if (block, setting) in cells else "" for setting in settings]
        lines.append(f"| {block} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _text(row: dict[str, Any]) -> str:
    variance = f" ({row['variance']:.2f}, {row['measured']:.2f})" if "variance" in row else ""
    return f"{row['counted']:.2f}{variance}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=list(BLOCKS))
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print the table of this file")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))
        return
    rows = [row for name in options.blocks for row in rows_of(name)]
    print(table(rows))
    if options.json:
        report = {
            "benchmark": "block_bytes",
            "date": datetime.date.today().isoformat(),
            "hardware": processor(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gact_dist": gact_dist.__version__,
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
