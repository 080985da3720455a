"""`gact-dist max-batch`: the largest batch of a job in a given memory, for each level and with checkpointing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from .._errors import says_out_of_memory
from ..config import Config
from ..policies import policy_of
from ..profile import UNTOUCHED
from .batch_search import Probe, largest, next_batch
from .figures import SPEEDS, max_batch_figures
from .loading import JobArgument, load_function
from .malloc_settings import MALLOC_SETTINGS, WAITING_SETTINGS
from .output import (
    COULD_NOT,
    FOUND_NOTHING,
    CommandError,
    JsonOption,
    bytes_of,
    check_writable,
    report_error,
    report_left_out,
    show,
    shown_bytes,
    working,
)
from .page import page_of_figures
from .pictures import check_can_draw, write_png
from .stopping import exit_code_of
from .trial import OFF, Trial

_FIRST = 4
_RESOLUTION = 1 / 12
_ON_CPU_BYTES = 2 << 30


@dataclass(frozen=True)
class Method:
    """A way to train, and what was found of it."""

    level: str
    checkpoints: bool
    outline: tuple[Probe, ...] = ()
    """of steps without measurements, where the level has those: they say where to look"""
    probes: tuple[Probe, ...] = ()
    """of whole tries: they decide"""

    @property
    def measures(self) -> bool:
        """Whether its job adapts bits, or compares the gradient with the exact one."""
        return policy_of(Config.from_level(self.level)).rounds

    @property
    def name(self) -> str:
        """For people."""
        if self.level == OFF:
            return "checkpointing" if self.checkpoints else UNTOUCHED
        return f"{self.level} + checkpointing" if self.checkpoints else self.level

    @property
    def best(self) -> Probe | None:
        """The largest that fits."""
        return largest(self.probes)


def command(
    job: JobArgument,
    memory: Annotated[
        str | None, typer.Option(help="What a try may use, such as 2GiB; the whole GPU, or 2GiB on a CPU.")
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(help="Levels to compare, such as untouched,L2; default: untouched, L1, L2, and L3 on a GPU."),
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="Call FUNCTION(batch, SEQUENCE).")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Call FUNCTION(BATCH, sequence), and look for the longest sequence.")
    ] = None,
    checkpoint: Annotated[bool, typer.Option(help="Try each level with checkpointed blocks as well.")] = True,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or none.")] = "adamw",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one.")] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="No larger size is tried.")] = 65536,
    timeout: Annotated[float, typer.Option(help="Seconds; a try that takes longer does not fit.")] = 300.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a plot: .html or .png.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the largest batch (or sequence) that fits into some memory, for each level, and how fast it is.

    FUNCTION(batch) returns model and batch of that size. Each try is a process of its own that trains a few steps.

    [dim]Example:[/dim]
    def gpt(batch): return GPT(), torch.randint(0, 50257, (batch, 512))
    $ gact-dist max-batch jobs.py:gpt --memory 2GiB --levels untouched,L1,L2 --output max_batch.html
    """
    trial = _trial(job, memory, sequence, batch, optimizer, device)
    if not timeout > 0:
        raise CommandError(f"--timeout is {timeout:g}, expected a number of seconds above 0")
    load_function(job, *_sizes(batch or _FIRST, _FIRST if batch else sequence))
    methods = _methods(levels, checkpoint, trial.device)
    if output is not None and output.suffix not in (".html", ".png"):
        raise CommandError(f"--output is {output}, expected a name that ends in .html or .png")
    if output is not None:
        check_writable(output, "plot")
    if output is not None and output.suffix == ".png":
        check_can_draw()
    with working("trying", as_json) as now:

        def attempt(number: int, method: Method, measures: bool, size: int) -> Probe:
            now(f"{number} of {len(methods)}, {method.name}: {size}{' with measurements' if measures else ''}")
            sized = _sized(trial, method, size, batch is not None)
            return run_trial(replace(sized, measures=measures), size, timeout)

        found, ended = _searched(methods, attempt, trial.memory_bytes, most)
    what = "batch" if batch is None else "sequence"
    values = {**_values(found, trial, what), "most": most}
    if output is not None:
        values["plot_error"] = _draw(values, output, job)
    undrawn = values.get("plot_error")
    if isinstance(ended, CommandError):
        values["error"] = str(ended)
    show(values, as_json, _table(values, what), _closing(values, None if undrawn else output))
    errors = [text for text in (undrawn, values.get("error")) if text]
    for text in errors:  # what took so long to find is shown nevertheless
        report_error(text, as_json=False)
    if ended is not None:
        left_out = [method.name for method in methods[len(found) :]]
        report_left_out(left_out, interrupted=isinstance(ended, KeyboardInterrupt))
    if isinstance(ended, KeyboardInterrupt):
        raise typer.Exit(exit_code_of(ended))
    if errors:
        raise typer.Exit(COULD_NOT)
    if not any(method.best for method in found):
        raise typer.Exit(FOUND_NOTHING)


def _searched(
    methods: Sequence[Method], attempt: Callable[[int, Method, bool, int], Probe], memory_bytes: int, most: int
) -> tuple[list[Method], KeyboardInterrupt | CommandError | None]:
    """What was found of each method, and what ended the search when some were known: the user, or one that failed."""
    found: list[Method] = []
    for number, method in enumerate(methods, 1):
        first = found[-1].best.batch if found and found[-1].best else _FIRST  # it will be near
        try:
            outline = search(partial(attempt, number, method, False), memory_bytes, first, most)
            probes = confirm(partial(attempt, number, method, True), memory_bytes, outline) if method.measures else []
        except (KeyboardInterrupt, CommandError) as ended:
            if not found:
                raise
            return found, ended
        decides = probes or outline
        found.append(replace(method, outline=tuple(outline) if probes else (), probes=tuple(decides)))
    return found, None


def _trial(
    job: str, memory: str | None, sequence: int | None, batch: int | None, optimizer: str, device: str | None
) -> Trial:
    """The settings that all tries share."""
    if sequence is not None and batch is not None:
        raise CommandError("--sequence and --batch given, expected one of them: the other is what is looked for")
    if optimizer not in ("adamw", "sgd", "none"):
        raise CommandError(f"--optimizer is {optimizer!r}, expected adamw, sgd or none")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise CommandError(f"--device is {kind!r}, expected cpu, or cuda where torch sees a GPU")
    if kind == "cpu" and not sys.platform.startswith("linux"):
        raise CommandError("max-batch limits the memory of a process as only Linux can: run it there, or on a GPU")
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if kind == "cuda" else None
    limit = bytes_of(memory) if memory else whole or _ON_CPU_BYTES
    return Trial(
        job=job, batch=batch or 0, sequence=sequence, level=OFF, checkpoints=False, memory_bytes=limit,
        device=kind, optimizer=optimizer,
    )  # fmt: skip


def _methods(levels: str | None, checkpoint: bool, device: str) -> list[Method]:
    wanted = ["L0", "L1", "L2", *(["L3"] if device == "cuda" else [])]
    if levels is not None:
        wanted = list(dict.fromkeys(level.strip() for level in levels.split(",")))
    wanted = [OFF if level == UNTOUCHED else level for level in wanted]
    for level in wanted:
        try:
            offloads = Config.from_level(level).offload.enabled
        except ValueError as refused:
            raise CommandError(f"{refused}; {UNTOUCHED!r} is the job without compression") from None
        if offloads and device != "cuda":
            raise CommandError(f"level {level} offloads from a GPU, and there is none: leave it out of --levels")
    return [Method(level, with_it) for with_it in ([False, True] if checkpoint else [False]) for level in wanted]


def _sized(trial: Trial, method: Method, size: int, is_sequence: bool) -> Trial:
    chosen = replace(trial, level=method.level, checkpoints=method.checkpoints)
    return replace(chosen, sequence=size) if is_sequence else replace(chosen, batch=size)


def _sizes(batch: int, sequence: int | None) -> tuple[int, ...]:
    """What the function is called with."""
    return (batch,) if sequence is None else (batch, sequence)


def search(
    attempt: Callable[[int], Probe], memory_bytes: int, first: int, most: int, known: Sequence[Probe] = ()
) -> list[Probe]:
    """Try sizes until the largest that fits is known, or that `most` does. first: what to begin with."""
    probes = list(known)
    while (size := next_batch(probes, memory_bytes, min(first, most), _RESOLUTION)) is not None:
        size = min(size, most)
        if any(probe.batch == size for probe in probes):
            break
        probes.append(attempt(size))
    return probes


def confirm(attempt: Callable[[int], Probe], memory_bytes: int, outline: Sequence[Probe]) -> list[Probe]:
    """Whole tries, beginning at the largest that fits without measurements; empty if none does.

    A measurement seldom holds more than a step, so mostly the first fits. It takes as long as many steps, for which
    reason the sizes on the way there do without.
    """
    best = largest(outline)
    if best is None:
        return []
    probes = [attempt(best.batch)]
    # one that is a little smaller than one that is late would be late as well
    below = best.batch // 2 if probes[0].is_late else best.batch - max(1, int(best.batch * _RESOLUTION))
    if probes[0].fits or not below:
        return probes
    return search(attempt, memory_bytes, below, best.batch, [*probes, attempt(below)])


def run_trial(trial: Trial, size: int, timeout_s: float) -> Probe:
    """Run a try in a process of its own. Raises CommandError where it failed for another reason than memory."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "gact_dist.cli.trial", json.dumps(asdict(trial)), str(result)]
        environment = {**MALLOC_SETTINGS, **WAITING_SETTINGS, **os.environ}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
        except subprocess.TimeoutExpired:
            return Probe(batch=size, fits=False, reason=f"not over after {timeout_s:g} s", is_late=True)
        found = json.loads(result.read_text()) if result.is_file() else {}
    if "error" in found:
        raise CommandError(f"a try of {size} failed: {found['error']}")
    if found:
        return Probe(**{**found, "batch": size})
    lack = says_out_of_memory(done.stderr)
    if done.returncode < 0 or lack:
        ended = f"ended by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else ""
        return Probe(batch=size, fits=False, reason=lack or ended)
    raise CommandError(f"a try of {size} ended with status {done.returncode}: {done.stderr.strip()[-600:]}")


# -- what is shown ---------------------------------------------------------------------------------------------------


def _values(methods: Sequence[Method], trial: Trial, what: str) -> dict[str, Any]:
    untouched = next((method.best for method in methods if method.name == UNTOUCHED), None)
    rows = []
    for method in methods:
        best = method.best
        per_try = trial.batch if what == "sequence" else (best.batch if best else 0)
        per_s = per_try / best.step_s if best and best.step_s else None
        tokens = (best.batch if best else 0) if what == "sequence" else trial.sequence
        rows.append(
            {
                "method": method.name,
                "level": method.level,
                "checkpointing": method.checkpoints,
                what: best.batch if best else 0,
                "gain": best.batch / untouched.batch if best and untouched else None,
                "step_s": best.step_s if best else None,
                "samples_per_s": per_s,
                "tokens_per_s": per_s * tokens if per_s and tokens else None,
                "peak_bytes": best.peak_bytes if best else None,
                "tries": [
                    *({**asdict(probe), "measures": False} for probe in method.outline),
                    *({**asdict(probe), "measures": method.measures} for probe in method.probes),
                ],
            }
        )
    return {"job": trial.job, "memory_bytes": trial.memory_bytes, "device": trial.device, "of": what, "methods": rows}


def _table(values: dict[str, Any], what: str) -> Table:
    table = Table("method", box=None, pad_edge=False)
    key, unit = SPEEDS[what]
    for heading in (f"largest {what}", "gain", "step", unit, "tries"):
        table.add_column(heading, justify="right")
    for row in values["methods"]:
        gain = "" if row["gain"] is None else f"{row['gain']:.1f}x"
        step = "" if row["step_s"] is None else f"{row['step_s']:.3g} s"
        speed = "" if row[key] is None else _of_three_digits(row[key])
        table.add_row(
            row["method"], f"{row[what]:,}" if row[what] else "none fits", gain, step, speed, str(len(row["tries"]))
        )
    return table


def _of_three_digits(value: float) -> str:
    """A number rounded to three digits, and written out: 24,600."""
    return f"{float(f'{value:.3g}'):,.12g}"


def _closing(values: dict[str, Any], output: Path | None) -> Text:
    where = "the GPU" if values["device"] == "cuda" else "a CPU"
    text = "".join(
        f"\n{row['method']}: not even {row['tries'][-1]['batch']} fits: {row['tries'][-1]['reason']}"
        for row in values["methods"]
        if not row[values["of"]]
    )
    text += "\nGive more --memory, or more --timeout where a try was not over." if text else ""
    for row in values["methods"]:
        late = [probe["batch"] for probe in row["tries"] if probe["is_late"]]
        if late and row[values["of"]]:
            text += f"\n{row['method']}: the try of {min(late)} was too slow, not too large; give more --timeout."
    at_most = [row["method"] for row in values["methods"] if row[values["of"]] == values["most"]]
    if at_most:
        text += f"\n{', '.join(at_most)}: nothing above --most {values['most']} was tried; more may fit."
    text += f"\nEach in {shown_bytes(values['memory_bytes'])} on {where}, libraries not counted."
    if values["device"] == "cpu":
        settings = " ".join(f"{key}={value}" for key, value in MALLOC_SETTINGS.items())
        text += f" To have as much, start the job with {settings}."
    return Text(text + (f" Plot: {output}" if output is not None else ""))


def _draw(values: dict[str, Any], output: Path, job: str) -> str | None:
    """Write the plot. Returns why it cannot be written, or None."""
    figures = max_batch_figures(values)
    try:
        if output.suffix == ".png":
            write_png(figures[0], output)
            return None
        subtitle = f"{job} in {shown_bytes(values['memory_bytes'])} on {values['device']}"
        output.write_text(page_of_figures(f"Largest {values['of']}", subtitle, figures), encoding="utf-8")
    except (OSError, CommandError) as refused:
        return f"the plot cannot be written to {output}: {refused}"
    return None
