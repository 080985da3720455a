"""Do the policies do what is claimed of them? Six models, every policy and width, against the untouched job by seed.

    python -m benchmarks.fidelity.run            # everything that the file does not hold yet; hours
    python -m benchmarks.fidelity.run --models gat --settings "gact 2" "acgc 0.25" --seeds 1
    python -m benchmarks.fidelity.run --plot     # tables and pictures of what the file holds

One process and one thread for each. A run trains a model with one setting, from the same initialisation and on the same
batches as the untouched run of its seed; a third into it and at its end, the variance that its plan adds to the
gradient is predicted and measured on the batches that come next. A comparison takes the untouched job's weights at the
same two moments and sets uniform widths against adaptive ones in the same bytes, and against policy acgc; and plans
that store what backward could make again against plans that derive it, in three quarters of their bytes. Every run and
every comparison is written as soon as it is done and not repeated: after a change of the library, remove the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import gact_dist
from benchmarks.fidelity.claims import claims_table
from benchmarks.fidelity.report import IN_BYTES_OF_STORED, LESS_BYTES, STORED, UNTOUCHED, plot, tables
from benchmarks.gradient.gradients import Noise, Point, average_bits
from examples.train.config import ROOT, RunConfig, load_config
from examples.train.loop import train
from examples.train.ranks import Ranks
from examples.train.tasks import Batch, Task, batch_rows, select

# Changes to configs/NAME.toml. Text takes fewer steps of half the size, so that a run is about a minute; a graph has no
# samples, only nodes whose losses are averaged.
MODELS: dict[str, tuple[str, ...]] = {
    "image": (),
    "text": ("steps=50", "batch_size=32", "test_examples=2000", "adapt_interval=20", "calibration_samples=8"),
    "language": (),
    "graph": ("calibration_samples=140",),
    "sage": ("calibration_samples=140",),
    "gat": ("calibration_samples=140",),
}
BITS = (("uniform", (2, 4)), ("gact", (2, 3, 4)), ("actnn", (2, 4)))
SETTINGS: dict[str, dict[str, Any]] = {
    UNTOUCHED: {},
    **{
        f"{policy} {bits}": {"policy": policy, "bits": bits, "group_size": 256 if bits == 2 else 128}  # as the levels
        for policy, widths in BITS
        for bits in widths
    },
    STORED: {"policy": "gact", "bits": 2, "group_size": 256, "derive": False},
    IN_BYTES_OF_STORED: {"policy": "gact"},  # retained_bytes as a run with STORED has found them
    "acgc 0.25": {"policy": "acgc", "error": 0.25},
}
UNIFORM = tuple(range(1, 9))  # widths that are compared
SAME_BYTES = (2, 3, 4)  # those whose bytes an adaptive plan is given
ERROR_BOUND = "acgc 0.25"  # compared with them
STORED_BITS = {"text": (3, 4), "language": (3, 4)}  # of plans that derive nothing
MOMENTS = (1 / 3, 1.0)  # of a run, at which gradients are measured
BATCHES, DRAWS = 6, 2


@dataclass
class Recorder:
    """What is taken from a run while it trains."""

    steps: int
    task: Task | None = None
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """by the number of steps done: the model's state"""
    states: dict[int, dict[str, str]] = field(default_factory=dict)
    """the controller's"""
    sizes: list[tuple[int, int, float]] = field(default_factory=list)
    """retained and exact bytes of a step and its average bits, ten times a run"""

    def __call__(self, step: int, task: Task, gact: gact_dist.Controller | None) -> None:
        """After a step."""
        self.task = task
        if gact is not None and step % max(1, self.steps // 10) == 0:
            report = gact.report()
            self.sizes.append((report.retained_bytes, report.exact_bytes, average_bits(report, gact.plan)))
        if step in moments(self.steps):
            self.weights[step] = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
            if gact is not None:
                self.states[step] = gact.state_dict()


def moments(steps: int) -> list[int]:
    """Steps after which gradients are measured."""
    return [max(1, round(steps * part)) for part in MOMENTS]


def settings_of(config: RunConfig, seed: int, **choice: Any) -> gact_dist.Config:
    """gact_dist's settings for one job."""
    schedule: dict[str, Any] = {
        "adapt_interval": config.adapt_interval,
        "calibration_samples": config.calibration_samples,
    }
    return gact_dist.Config(**schedule, seed=seed, **choice)


def trained(config: RunConfig, choice: dict[str, Any], seed: int) -> tuple[dict[str, Any], Recorder]:
    """A training run: what it reached and kept, and what was recorded for gradients. choice: none if untouched."""
    recorder = Recorder(config.steps)
    settings = settings_of(config, seed, **choice) if choice else None
    started_s = time.process_time()
    measured = train(config, Ranks(), torch.device("cpu"), seed=seed, settings=settings, after_step=recorder)
    found = {"accuracy": measured.accuracy, "test_loss": measured.test_loss}
    found |= {"final_loss": statistics.mean(measured.losses[-10:]), "time_s": time.process_time() - started_s}
    if recorder.sizes:
        columns = [statistics.mean(column) for column in zip(*recorder.sizes, strict=True)]
        found |= dict(zip(("retained_bytes", "exact_bytes", "average_bits"), columns, strict=True))
    numbers = ("step", "kept", "average_bits", "predicted_variance", "gradient_error")
    return found | {"history": [{key: adaptation[key] for key in numbers} for adaptation in measured.history]}, recorder


def point_of(config: RunConfig, recorder: Recorder, step: int, seed: int) -> Point:
    """The recorded model after some steps, and the batches that come next."""
    task = recorder.task
    if task is None:
        raise ValueError("nothing was recorded: give the Recorder to train() as after_step")
    task.model.load_state_dict(recorder.weights[step])
    task.model.train()

    def loss_fn(batch: Batch) -> Tensor:
        return functional.cross_entropy(task.logits(task.model, batch), batch["labels"])

    sizes = {"examples": len(task.train["labels"]), "batch_size": config.batch_size}
    rows = [batch_rows(step + n, seed=seed, rank=0, world_size=1, **sizes) for n in range(BATCHES)]
    return Point(task.model, loss_fn, [select(task.train, part) for part in rows], rows)


def run(config: RunConfig, choice: dict[str, Any], seed: int) -> dict[str, Any]:
    """One compressed run, and what its plans add to the gradient."""
    found, recorder = trained(config, choice, seed)
    chosen = settings_of(config, seed, **choice)
    noises = {
        step: point_of(config, recorder, step, seed).noise(chosen, draws=DRAWS, state=state)
        for step, state in recorder.states.items()
    }
    return found | {"moments": [entry(step, noise) for step, noise in noises.items()]}


def compare(config: RunConfig, recorder: Recorder, model: str, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of uniform widths, of adaptive ones in the same bytes and of acgc, on the untouched job's weights."""
    for step in recorder.weights:
        point = point_of(config, recorder, step, seed)
        chosen = partial(settings_of, config, seed, adapt_tolerance=0.0)
        for setting, found in compared(point, chosen, STORED_BITS.get(model, ())):
            yield {"setting": setting} | entry(step, found)


def compared(
    point: Point, settings: Callable[..., gact_dist.Config], stored_bits: tuple[int, ...]
) -> Iterator[tuple[str, Noise]]:
    """(setting, what it adds) of all that is compared at one moment. settings: the job's, for a choice."""

    def adds(**choice: Any) -> Noise:
        return point.noise(settings(**choice), draws=DRAWS)

    uniform = {bits: adds(policy="uniform", bits=bits) for bits in UNIFORM}
    for bits, found in uniform.items():
        yield f"uniform {bits}", found
    for bits in SAME_BYTES:
        yield f"gact in the bytes of uniform {bits}", adds(policy="gact", retained_bytes=uniform[bits].retained_bytes)
    for bits in stored_bits:
        stored = adds(policy="gact", bits=bits, derive=False)
        yield f"stored {bits}", stored
        fewer = round(LESS_BYTES * stored.retained_bytes)
        yield f"derived in fewer bytes than stored {bits}", adds(policy="gact", retained_bytes=fewer)
    yield ERROR_BOUND, adds(**SETTINGS[ERROR_BOUND])


def entry(step: int, noise: Noise) -> dict[str, Any]:
    """Plain values."""
    return {"step": step} | asdict(noise)


class Results:
    """The file, and which cells it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": [], "comparisons": []}

    def has_run(self, model: str, setting: str, seed: int) -> bool:
        """Whether this run is done."""
        return (model, setting, seed) in {(r["model"], r["setting"], r["seed"]) for r in self.held["runs"]}

    def has_comparison(self, model: str, seed: int) -> bool:
        """Whether the comparison on this job's weights is done."""
        return (model, seed) in {(r["model"], r["seed"]) for r in self.held["comparisons"]}

    def choice(self, model: str, setting: str, seed: int) -> dict[str, Any]:
        """What a setting means for a run. Raises ValueError where a run that it refers to has not been made."""
        if setting != IN_BYTES_OF_STORED:
            return SETTINGS[setting]
        about = model, STORED, seed
        found = [r["retained_bytes"] for r in self.held["runs"] if (r["model"], r["setting"], r["seed"]) == about]
        if not found:
            raise ValueError(f"{setting!r} needs the run {STORED!r} of {model}, seed {seed}: give that setting as well")
        return SETTINGS[setting] | {"retained_bytes": round(found[0])}

    def add(self, kind: str, *rows: dict[str, Any]) -> None:
        """Write further rows of "runs" or "comparisons"."""
        facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "torch": torch.__version__}
        self.held |= facts | {"gact_dist": gact_dist.__version__, "batches": BATCHES, "draws": DRAWS}
        self.held[kind] += [row | {"date": facts["date"]} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.held, indent=1) + "\n")
        partial.replace(self.path)


def run_missing(
    results: Results, config: RunConfig, model: str, settings: list[str], seed: int, *, compares: bool = True
) -> None:
    """All cells of one model and seed that are not there yet. The untouched job trains once for run and comparison."""
    cell = {"model": model, "seed": seed}
    missing = [setting for setting in settings if not results.has_run(model, setting, seed)]
    lacks_comparison = compares and not results.has_comparison(model, seed)
    if UNTOUCHED in missing or lacks_comparison:
        found, recorder = trained(config, {}, seed)
        if UNTOUCHED in missing:
            results.add("runs", cell | {"setting": UNTOUCHED} | found)
            print(f"{model} {seed} {UNTOUCHED}: {found['accuracy']:.4f}, {found['time_s']:.0f} s", flush=True)
        if lacks_comparison:
            results.add("comparisons", *(cell | row for row in compare(config, recorder, model, seed)))
            print(f"{model} {seed} compared", flush=True)
    for setting in missing:
        if setting != UNTOUCHED:
            found = run(config, results.choice(model, setting, seed), seed)
            results.add("runs", cell | {"setting": setting} | found)
            ratio = found["exact_bytes"] / found["retained_bytes"]
            seen = f"{found['accuracy']:.4f}, ratio {ratio:.2f}, {found['time_s']:.0f} s"
            print(f"{model} {seed} {setting}: {seen}", flush=True)


def report(held: dict[str, Any]) -> str:
    """Markdown: when and with what it was measured, the claims, and all tables."""
    head = (
        f"Measured until {held['date']}, torch {held['torch']}, {held['machine']}, one thread; made by "
        "`python -m benchmarks.fidelity.run --plot`.\n"
        "A star: worse by more than the untouched job's deviation over its seeds."
    )
    parts = ("# Fidelity", head, "## Claims", claims_table(held, SAME_BYTES), "## Tables", tables(held))
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "fidelity.json")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-comparisons", action="store_true", help="train only: comparisons take the longest")
    parser.add_argument("--plot", action="store_true", help="run nothing: tables and pictures beside the file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = Results(options.json)
    for seed in range(0 if options.plot else options.seeds):
        for model in options.models:
            config, compares = load_config(model, MODELS[model]), not options.no_comparisons
            run_missing(results, config, model, options.settings, seed, compares=compares)
    written = report(results.held)
    print(written)
    if options.plot:
        options.json.with_suffix(".md").write_text(written)
        plot(results.held, options.json)


if __name__ == "__main__":
    main()
