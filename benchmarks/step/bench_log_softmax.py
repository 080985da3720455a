"""What does it gain, and cost, to sample the log-softmax of a large vocabulary?

    python -m benchmarks.step.bench_log_softmax --json benchmarks/results/log_softmax.json
    python -m benchmarks.step.bench_log_softmax --table benchmarks/results/log_softmax.json

The Llama of peak_jobs.py with 32,000 words, 8 layers of width 256 and 16 sequences of 128 tokens (fp32, AdamW), and the
same with a second head that predicts the word after next: its loss is added, and one backward follows. A method is the
untouched job, or L2 with each value of Config.log_softmax, or L2 where each head and its loss lie under checkpoints,
which make the log-softmax again from the last hidden states: all tokens at once, or in eighths. For each:

    ratio    what the untouched job keeps for backward over what is kept, after the last step, as report() has it
    worst    the largest peak of all steps, in MB: bytes of torch's CPU allocator above the model, as in bench_peak.py
    later    the median of the peaks of the last steps, which do not adapt
    time     processor time of a step over that of the untouched job's: median over rounds in which all take turns
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gact_dist
from benchmarks.adaptation.bench_adaptation import processor
from benchmarks.step.bench_peak import live_peaks
from benchmarks.step.peak_jobs import llama
from gact_dist import Config

SIZES = {"batch_size": 16, "length": 128, "words": 32_000, "layers": 8, "width": 256}
CHECKPOINTS = {"made again": 1, "made again in eighths": 8}
"""in how many parts"""
METHODS = "untouched", "exact", "sampled", *CHECKPOINTS
STEPS = 10
LATER = 3
"""of the steps, the last ones"""
ROUNDS = 5


class Heads(nn.Module):
    """A Llama that predicts the next word, and with a second head the one after that."""

    def __init__(self, heads: int, sizes: dict[str, int], parts: int = 0) -> None:
        """parts: of the tokens, for each of which a checkpoint makes the head and the loss again; 0 without."""
        super().__init__()
        self._parts = parts
        job = llama(**sizes)
        self.llama, self.tokens = job.pretrained, job.batch["input_ids"]
        width, words = sizes["width"], sizes["words"]
        self.further = nn.ModuleList(nn.Linear(width, words, bias=False) for _ in range(heads - 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss on tokens [batch, length]."""
        hidden = self.llama.model(tokens).last_hidden_state
        losses = []
        for ahead, head in enumerate([self.llama.lm_head, *self.further], 1):
            states, targets = hidden[:, :-ahead].flatten(0, 1), tokens[:, ahead:].flatten()
            losses.append(self._sum(head, states, targets) / len(targets))
        return torch.stack(losses).sum()

    def _sum(self, head: nn.Module, states: Tensor, targets: Tensor) -> Tensor:
        def loss(states: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(head(states), targets, reduction="sum")

        if not self._parts:
            return loss(states, targets)
        parts = zip(states.chunk(self._parts), targets.chunk(self._parts), strict=True)
        return torch.stack([checkpoint(loss, *part, use_reentrant=False) for part in parts]).sum()


class Training:
    """One method: start() attaches what it needs, step() is a training step."""

    def __init__(self, method: str, heads: int, sizes: dict[str, int]) -> None:
        torch.manual_seed(0)
        self._method, self._model = method, Heads(heads, sizes, CHECKPOINTS.get(method, 0))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._gact: Any = None
        self._update(self._model(self._model.tokens))  # the optimizer has its state

    def start(self) -> None:
        """Attach gact_dist."""
        if self._method != "untouched":
            way = "sampled" if self._method in CHECKPOINTS else self._method
            config = Config.from_level("L2", log_softmax=way, adapt_interval=1000)
            self._gact = gact_dist.attach(self._model, config=config)

    def step(self) -> None:
        """Forward, backward and update."""
        tokens = self._model.tokens
        if self._gact is None:
            loss = self._model(tokens)
        else:
            with self._gact.step(self._model, tokens):
                loss = self._model(tokens)
        self._update(loss)

    def kept(self) -> dict[str, Any]:
        """By report()."""
        if self._gact is None:
            return {}
        report = self._gact.report()
        return {"exact_bytes": report.exact_bytes, "retained_bytes": report.retained_bytes}

    def _update(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def measure(heads: int, sizes: dict[str, int], steps: int = STEPS, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A row for each method."""
    rows, trainings = [], {}
    for method in METHODS:
        training = trainings[method] = Training(method, heads, sizes)
        peaks = live_peaks(training.start, training.step, steps)
        peak = {"worst_bytes": max(peaks), "later_bytes": statistics.median(peaks[-LATER:])}
        rows.append({"heads": heads, "method": method, **peak, **training.kept()})
    whole = max(row.pop("exact_bytes", 0) for row in rows)  # less under checkpoints
    for row in rows:
        if "retained_bytes" in row:
            row["ratio"] = whole / row["retained_bytes"]
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, training in trainings.items():
            start_s = time.process_time()
            training.step()
            times[method].append(time.process_time() - start_s)
    for row in rows:
        ratios = [own / other for own, other in zip(times[row["method"]], times["untouched"], strict=True)]
        row["time"] = statistics.median(ratios)
    return rows


def table(report: dict[str, Any]) -> str:
    """The rows in Markdown."""
    lines = ["| heads | method | ratio | worst, MB | later, MB | time |", "|---|---|---|---|---|---|"]
    for row in report["rows"]:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        peaks = f"{row['worst_bytes'] / 1e6:.0f} | {row['later_bytes'] / 1e6:.0f}"
        lines.append(f"| {row['heads']} | {row['method']} | {ratio} | {peaks} | {row['time']:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description="sampling the log-softmax of a large vocabulary")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="print a report that was written before")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return 0
    rows = [row for found in map(partial(measure, sizes=SIZES), (1, 2)) for row in found]
    about = {"date": f"{datetime.date.today()}", "torch": torch.__version__, "processor": processor()}
    report = {**about, "system": platform.platform(), "threads": torch.get_num_threads(), "sizes": SIZES, "rows": rows}
    print(table(report))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
