"""`gact-dist profile`: where the memory of a training step goes, and what each level of compression would leave."""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Column, Table
from torch import nn

from ..profile import (
    DEFAULT_LEVELS,
    KINDS,
    LAYOUTS,
    OPTIMIZERS,
    KeptTensor,
    LevelProfile,
    Profile,
    ProfileError,
    Settings,
    Share,
    profile,
)
from .loading import Job, UserCode, job_of, load_function, loss_of
from .output import CommandError, JsonOption, show, shown_bytes, unit_of, working

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 64
_NAME_WIDTH, _WHY_WIDTH = 24, 36
_Option = typer.Option
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="MODULE:FUNCTION or FILE.py:FUNCTION, a function that returns (model, batch), the model's output "
            "being the loss or having one, or (model, batch, loss_fn), or a transformers config; or a transformers "
            "config itself: a folder, a JSON file, or the name of one that is on this machine.",
        ),
    ],
    level: Annotated[
        list[str] | None,
        _Option(help=f"Levels to profile, each with its own --level; default: {', '.join(DEFAULT_LEVELS)}."),
    ] = None,
    layout: Annotated[str | None, _Option(help=f"How ranks share the job: {', '.join(LAYOUTS)}.")] = None,
    world_size: Annotated[int, _Option(help="Ranks of the layout; the figures are those of rank 0.")] = 1,
    fake: Annotated[bool, _Option("--fake", help="Use no memory: shapes only. Always so with a layout.")] = False,
    batch_size: Annotated[int, _Option(help="Examples on a rank, for a config.")] = 1,
    sequence: Annotated[int, _Option(help="Tokens of an example, for a config.")] = 2048,
    optimizer: Annotated[str, _Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "adamw",
    dtype: Annotated[str | None, _Option(help=f"Convert the model: {', '.join(_DTYPES)}.")] = None,
    compute_dtype: Annotated[str | None, _Option(help="In which sharded parameters are gathered.")] = None,
    reduce_dtype: Annotated[str | None, _Option(help="In which the gradients of a sharded model are reduced.")] = None,
    reshard: Annotated[
        str | None, _Option(help="Free gathered parameters after forward: yes, no, or the ranks to reshard to.")
    ] = None,
    shard_ranks: Annotated[int | None, _Option(help="Ranks that share one copy of the model (HSDP).")] = None,
    wrap: Annotated[
        list[str] | None, _Option(help="Classes of modules that are sharded or checkpointed on their own.")
    ] = None,
    checkpointing: Annotated[bool, _Option("--checkpointing", help="Recompute these modules in backward.")] = False,
    shown: Annotated[str | None, _Option("--show", help="The level whose modules and lines are listed.")] = None,
    rows: Annotated[int, _Option(help="Rows of each table.")] = 12,
    as_json: JsonOption = False,
) -> None:
    """Say where the memory of a training step goes: by module, operator and line, over the time of the step.

    And what each level would keep, what it would derive, what stays exact and why, and the peak.

    [dim]Examples:[/dim]
    $ gact-dist profile my_jobs.py:small
    $ gact-dist profile llama-7b/config.json --layout fsdp2 --world-size 64 --sequence 4096
    """
    try:
        settings = Settings(
            world_size=world_size, layout=layout, fake=fake, optimizer=optimizer, dtype=_dtype(dtype),
            compute_dtype=_dtype(compute_dtype), reduce_dtype=_dtype(reduce_dtype), reshard=_reshard(reshard),
            shard_ranks=shard_ranks, wrap=tuple(wrap or ()), checkpointing=checkpointing,
        )  # fmt: skip
        levels = level or list(DEFAULT_LEVELS)
        if shown is not None and shown not in levels:
            raise ProfileError(f"--show is {shown!r}, expected one of the levels: {', '.join(levels)}")
        build = _builder(target, batch_size, sequence)
        with working(f"profiling {target}", as_json) as tell, UserCode(f"a step of {target}"):
            found = _profiled(build, levels, settings, tell)
    except ProfileError as error:
        raise CommandError(str(error)) from None
    if isinstance(found, ProfileError):
        raise CommandError(str(found))
    show(found.to_dict(), as_json, *_tables(target, found, found.level(shown or levels[0]), rows))


def _profiled(build: Any, levels: Sequence[str], settings: Settings, tell: Any) -> Profile | ProfileError:
    """What is refused is returned: it is not the user's code that failed."""
    try:
        return profile(build, levels, settings, tell)
    except ProfileError as error:
        return error


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in _DTYPES:
        raise ProfileError(f"{name!r} is no type of parameters, expected one of {', '.join(_DTYPES)}")
    return None if name is None else _DTYPES[name]


def _reshard(text: str | None) -> bool | int | None:
    known: dict[str | None, bool | int | None] = {None: None, "yes": True, "no": False}
    if text in known:
        return known[text]
    if text is not None and text.isdigit():
        return int(text)
    raise ProfileError(f"--reshard is {text!r}, expected yes, no or a number of ranks")


# -- the job -----------------------------------------------------------------------------------------------------------


def _builder(target: str, batch_size: int, sequence: int) -> Callable[[], tuple[nn.Module, Any, Any]]:
    """What builds the job, each time anew."""
    if ":" not in target:
        config = _config(target)
        return lambda: _parts(_job_of_config(config, batch_size, sequence))
    function = load_function(target)

    def build() -> tuple[nn.Module, Any, Any]:
        with UserCode(f"{target}()"):
            made = function()
        return _parts(_job_of_config(made, batch_size, sequence) if _is_config(made) else job_of(target, made))

    return build


def _parts(job: Job) -> tuple[nn.Module, Any, Any]:
    return job.model, job.batch, job.loss_fn


def _is_config(made: Any) -> bool:
    return any(base.__name__ in ("PretrainedConfig", "PreTrainedConfig") for base in type(made).__mro__)


def _config(target: str) -> Any:
    """The transformers config in a folder or a file, or of a model that is on this machine."""
    if importlib.util.find_spec("transformers") is None:
        raise CommandError(
            f"{target!r} is no MODULE:FUNCTION, and a config needs transformers: pip install transformers"
        )
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(target, local_files_only=True)
    except (OSError, ValueError) as error:
        where = "cannot be read" if Path(target).exists() else "is not on this machine"
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CommandError(
            f"the config {target!r} {where}, expected a folder with config.json, a JSON file of a config, or "
            f"MODULE:FUNCTION: {reason}"
        ) from None


def _job_of_config(config: Any, batch_size: int, sequence: int) -> Job:
    """A causal language model of random weights on random tokens; labels are the tokens."""
    from transformers import AutoModelForCausalLM

    config.use_cache = False  # of keys and values, which no training step reads
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.zeros((batch_size, sequence), dtype=torch.long, device="cpu")
    return Job(model, {"input_ids": tokens, "labels": tokens}, lambda batch: loss_of(model, batch))


# -- tables ------------------------------------------------------------------------------------------------------------


def _tables(target: str, found: Profile, chosen: LevelProfile, rows: int) -> Iterable[RenderableType]:
    where = f"rank 0 of {found.world_size}, {found.layout}" if found.layout else "one rank"
    how = "fake tensors" if found.fake else "measured on the job's own tensors"
    yield f"[bold]{escape(target)}[/]: {found.parameters:,} parameters, {where}, {how}\n"
    yield _levels(found)
    yield _kinds(found)
    yield _over_time(found)
    title = f"under {chosen.level}, by"
    yield _shares(f"{title} module (* stands for numbers)", "(the model itself)", _together(chosen.modules), rows)
    yield _shares(f"{title} operator", "(before the step)", chosen.operators, rows)
    yield _shares(f"{title} line", "(none: parameters, optimizer)", chosen.lines, rows)
    if any(level.tensors for level in found.levels):
        yield _tensors(found, rows)
    for note in found.notes:
        yield f"[dim]{escape(note)}[/]"


def _levels(found: Profile) -> Table:
    exact = max(level.exact_bytes for level in found.levels)
    divisor, unit = unit_of(max(level.peak_bytes for level in found.levels))
    table = _compact("level", "peak", "forward", "backward", "optimizer", "kept", "", "optimizer on host")
    for level in found.levels:
        kept = level.retained_bytes if level.tensors else exact
        phases = (level.phase_peaks.get(name, 0) for name in ("forward", "backward", "optimizer"))
        sizes = [f"{size / divisor:.1f}" for size in (level.peak_bytes, *phases)]
        share = [f"{kept / divisor:.1f}", f"{kept / exact:.0%}"] if exact else ["-", ""]
        table.add_row(level.level, *sizes, *share, f"{level.without_optimizer_bytes / divisor:.1f}")
    table.title = f"peak of live memory, in each phase, and the activations kept for backward ({unit})"
    return table


def _kinds(found: Profile) -> Table:
    divisor, unit = unit_of(max(level.peak_bytes for level in found.levels))
    table = _compact("at the peak", *(level.level for level in found.levels))
    table.title = f"what the memory is for ({unit})"
    for kind in KINDS:
        sizes = [level.peak.get(kind, 0) for level in found.levels]
        if any(sizes):
            table.add_row(kind, *(f"{size / divisor:.1f}" if size else "-" for size in sizes))
    return table


def _compact(first: str, *numbers: str) -> Table:
    """A table that fits into 80 characters."""
    columns = (Column(name, justify="right") for name in numbers)
    return Table(Column(first, no_wrap=True), *columns, box=box.SIMPLE_HEAD, pad_edge=False)


def _over_time(found: Profile) -> Table:
    """One line of bars a level, from the first operator of the step to its last."""
    highest = max(level.peak_bytes for level in found.levels)
    table = Table(
        "level",
        "live memory, from the first operator of a step to the last",
        title="over the time of a step",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for level in found.levels:
        last = level.timeline[-1].operators + 1
        heights, phases = [0] * _WIDTH, [""] * _WIDTH
        for moment in level.timeline:
            cell = min(_WIDTH - 1, moment.operators * _WIDTH // last)
            heights[cell] = max(heights[cell], moment.total)
            phases[cell] = phases[cell] or moment.phase
        table.add_row(level.level, _bars(heights, phases, highest))
    table.caption = "[cyan]forward[/] [magenta]backward[/] [yellow]optimizer[/]"
    return table


def _bars(heights: list[int], phases: list[str], highest: int) -> str:
    colours = {"forward": "cyan", "backward": "magenta", "optimizer": "yellow"}
    shown, last = "", (0, "forward")
    for height, phase in zip(heights, phases, strict=True):
        last = (height, phase) if phase else last  # nothing changed
        bar = _BARS[min(len(_BARS) - 1, last[0] * len(_BARS) // (highest + 1))]
        shown += f"[{colours[last[1]]}]{bar}[/]"
    return shown


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?=\.|:|$)", "*", name)


def _together(shares: Sequence[Share]) -> list[Share]:
    """Modules that differ by numbers only, added up."""
    found: dict[str, Share] = {}
    for share in shares:
        name = _pattern(share.name)
        known = found.get(name, Share(name, {}, {}))
        peak = {kind: known.peak.get(kind, 0) + share.peak.get(kind, 0) for kind in {**known.peak, **share.peak}}
        kept = {kind: known.kept.get(kind, 0) + share.kept.get(kind, 0) for kind in {**known.kept, **share.kept}}
        found[name] = replace(known, peak=peak, kept=kept)
    return sorted(found.values(), key=lambda share: -share.peak_bytes)


def _shares(title: str, nameless: str, shares: Sequence[Share], rows: int) -> Table:
    names = Column("", overflow="fold")
    table = Table(
        names, "at the peak", "of it", "after forward", "of it", title=title, box=box.SIMPLE_HEAD, pad_edge=False
    )
    for share in shares[:rows]:
        kept = shown_bytes(share.kept_bytes) if share.kept else "-"
        name, peak = escape(share.name or nameless), shown_bytes(share.peak_bytes)
        table.add_row(name, peak, _largest(share.peak), kept, _largest(share.kept))
    rest = shares[rows:]
    if rest:
        peak_bytes, kept_bytes = sum(one.peak_bytes for one in rest), sum(one.kept_bytes for one in rest)
        table.add_row(f"[dim]{len(rest)} more[/]", shown_bytes(peak_bytes), "", shown_bytes(kept_bytes), "")
    return table


def _largest(sizes: dict[str, int]) -> str:
    """The kinds that most of it is."""
    total = sum(sizes.values())
    most = sorted(sizes.items(), key=lambda item: -item[1])
    most = most[: 1 if most and most[0][1] >= 0.95 * total else 2]
    return ", ".join(f"{kind} {size / total:.0%}" for kind, size in most if total and size / total >= 0.01)


def _tensors(found: Profile, rows: int) -> Table:
    """What each level keeps of each saved tensor; those that differ by numbers only are one row."""
    levels = _distinct([level for level in found.levels if level.tensors])
    kept: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    how: dict[str, dict[str, str]] = defaultdict(dict)
    about: dict[str, KeptTensor] = {}
    for name, level in levels.items():
        for tensor in level.tensors:
            key = _pattern(tensor.name)
            kept[key][name] += tensor.nbytes
            how[key][name] = "" if tensor.codec == "quantised" else f" {tensor.codec}"
            if key not in about or (tensor.why_exact and not about[key].why_exact):
                about[key] = tensor
    named = Column("saved tensor, of which shape", overflow="fold", min_width=_NAME_WIDTH)
    keys = sorted(kept, key=lambda key: -max(kept[key].values()))
    divisor, unit = unit_of(max((max(kept[key].values()) for key in keys), default=0))
    title = f"what each level keeps of what autograd saves, {unit} (* stands for numbers)"
    why = Column("exact because", max_width=_WHY_WIDTH)
    table = Table(named, *levels, why, title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for key in keys[:rows]:
        cells = (f"{kept[key][name] / divisor:.2f}{how[key].get(name, '')}" for name in levels)
        shape = "x".join(map(str, about[key].shape))
        table.add_row(f"{escape(key)} [dim]{shape} {about[key].dtype}[/]", *cells, escape(about[key].why_exact))
    if len(keys) > rows:
        rest = (f"{sum(kept[key][name] for key in keys[rows:]) / divisor:.2f}" for name in levels)
        table.add_row(f"[dim]{len(keys) - rows} more[/]", *rest, "")
    return table


def _distinct(levels: Sequence[LevelProfile]) -> dict[str, LevelProfile]:
    """Levels by their names; those that keep the same are one."""
    found: dict[tuple[KeptTensor, ...], list[LevelProfile]] = defaultdict(list)
    for level in levels:
        found[level.tensors].append(level)
    return {", ".join(one.level for one in same): same[0] for same in found.values()}
