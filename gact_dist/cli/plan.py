"""`gact-dist plan`: bits for the tensors of a job, measured on its own batch, in a file that attach() begins with."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..config import Config
from ..controller import Controller, attach
from .layers import layers_of, with_exact_bytes
from .loading import Job, JobArgument, UserCode, load_job
from .output import CommandError, JsonOption, bytes_of, check_writable, show, shown_bytes, working

_SAMPLES = 8


def command(
    job: JobArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file for the plan.")],
    bits: Annotated[float | None, typer.Option(help="Average bits of an element, 1 to 8 (policy gact).")] = None,
    retained_bytes: Annotated[
        str | None, typer.Option(help="What a step may keep for backward, such as 2GiB (policy gact).")
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(help="Tolerated increase of the gradient's second moment, as 0.1 (policy acgc)."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Examples of the batch to measure on.")] = _SAMPLES,
    as_json: JsonOption = False,
) -> None:
    """Choose bits for each saved tensor of a model by measuring on its batch, and write them to a plan file.

    The file goes into Config(plan_file=...), or as "plan_file" into the "gact" block.

    [dim]Example:[/dim]
    $ gact-dist plan jobs.py:small --bits 3 --output plan.json
    gact_dist.attach(model, config=gact_dist.Config(bits=3, plan_file="plan.json"))
    """
    config = _config(bits, retained_bytes, error)
    check_writable(output, "plan")
    with working(f"building {job}", as_json) as now:
        made = load_job(job)
        controller = _calibrated(made, config, samples, now)
    if not controller.plan and controller.adaptation is not None:
        raise CommandError(
            f"no tensor that the job saves is rounded, so there is no plan: each has fewer than {config.min_numel} "
            "elements or has to stay exact; give a larger batch"
        )
    if not controller.plan:
        raise CommandError(
            "nothing could be measured, so there is no plan: the warnings above say why, such as a loss without "
            "a graph or too little memory"
        )
    try:
        controller.save_plan(str(output))
    except OSError as refused:
        raise CommandError(f"the plan cannot be written to {output}: {refused}") from None
    found = _found(controller, output)
    show(found, as_json, _layers(found), _summary(found, config, output))


def _config(bits: float | None, retained_bytes: str | None, error: float | None) -> Config:
    options = {"--bits": bits, "--retained-bytes": retained_bytes, "--error": error}
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        raise CommandError(
            f"{' and '.join(given) or 'no budget'} given, expected one of --bits, --retained-bytes and --error"
        )
    try:
        if error is not None:
            return Config(policy="acgc", error=error)
        if retained_bytes is not None:
            return Config(retained_bytes=bytes_of(retained_bytes))
        return Config(bits=bits)
    except (ValueError, TypeError) as refused:
        raise CommandError(str(refused)) from None


def _calibrated(job: Job, config: Config, samples: int, now: Any) -> Controller:
    """A controller with a plan, after one step under it."""
    _check_loss(job)
    controller = attach(job.model, config=config)
    now("measuring how much each tensor moves the gradient")
    with UserCode("measuring"):
        controller.calibrate(job.loss_fn, job.batch, samples)
        now("one step under the plan")
        with controller.step():
            loss = job.loss_fn(job.batch)
        loss.backward()
    return controller


def _check_loss(job: Job) -> None:
    """Raise CommandError where no gradient can follow from the loss, before it is measured."""
    if not any(parameter.requires_grad for parameter in job.model.parameters()):
        raise CommandError("no parameter of the model requires a gradient, expected a model that is trained")
    with UserCode("the loss"), torch.no_grad():
        loss = job.loss_fn(job.batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise CommandError(f"loss_fn(batch) returned {got}, expected the loss: a tensor of one element")
    if not loss.isfinite().all():
        raise CommandError(
            f"the loss is {loss.item()} on this batch, expected a finite one: no gradient follows from it"
        )


def _found(controller: Controller, output: Path) -> dict[str, Any]:
    report, adaptation = controller.report(), controller.adaptation
    rows = [{**asdict(row), "dtype": str(row.dtype)} for row in report.rows]
    layers = layers_of(with_exact_bytes(rows, report.exact_bytes))
    return {
        "plan_file": str(output),
        "tensors": len(controller.plan),
        "average_bits": None if adaptation is None else adaptation.average_bits,
        "predicted_variance": None if adaptation is None else adaptation.predicted_variance,
        "stored_exactly": {} if adaptation is None else adaptation.stored_exactly,
        "exact_bytes": report.exact_bytes,
        "retained_bytes": report.retained_bytes,
        "ratio": report.ratio,
        "layers": [
            {
                "name": layer.name,
                "exact_bytes": int(layer.exact_bytes),
                "retained_bytes": int(layer.retained_bytes),
                "bits": None if math.isnan(layer.average_bits) else layer.average_bits,
            }
            for layer in layers
        ],
    }


def _layers(found: dict[str, Any]) -> Table:
    table = Table("layer", box=None, pad_edge=False)
    for heading in ("untouched", "retained", "bits"):
        table.add_column(heading, justify="right")
    for layer in found["layers"]:
        bits = "-" if layer["bits"] is None else f"{layer['bits']:.2f}"
        table.add_row(layer["name"], shown_bytes(layer["exact_bytes"]), shown_bytes(layer["retained_bytes"]), bits)
    return table


def _summary(found: dict[str, Any], config: Config, output: Path) -> Text:
    default, chosen = Config().to_dict(), config.to_dict()
    budget = {key: chosen[key] for key in ("policy", "bits", "retained_bytes", "error")}
    given = "".join(f"{key}={value!r}, " for key, value in budget.items() if value not in (None, default[key]))
    text = Text()
    text.append(
        f"\nactivations of a step: {shown_bytes(found['exact_bytes'])} untouched, "
        f"{shown_bytes(found['retained_bytes'])} under the plan, {found['ratio']:.1f} times smaller\n"
    )
    if found["average_bits"]:
        text.append(f"{found['average_bits']:.2f} bits an element on average\n")
    if found["stored_exactly"]:
        text.append(f"stored exactly, as the gradient could not bear their rounding: {len(found['stored_exactly'])}\n")
    text.append(f"{found['tensors']} tensors in {output}; to begin with it:\n\n", style="bold")
    text.append(f'    gact_dist.attach(model, config=gact_dist.Config({given}plan_file="{output}"))\n')
    return text
