"""`gact-dist profile`: where the memory of a training step goes, and what each level of compression would leave."""

from __future__ import annotations

import importlib.util
import os
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
from torch import Tensor, nn

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
    with_small_values,
)
from .loading import Job, UserCode, job_of, load_function, loss_of
from .output import CommandError, JsonOption, show, shown_bytes, unit_of, working

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_SEQUENCE, _IMAGE = 2048, 224
_LEVEL_WIDTH, _NAME_WIDTH, _KIND_WIDTH = 9, 14, 14
_SHORT_KINDS = {
    "optimizer state": "optimizer", "compressed activations": "compressed", "recomputed activations": "recomputed",
}  # fmt: skip
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
    batch_size: Annotated[int | None, _Option(min=1, help="Examples on a rank, for a config; default: 1.")] = None,
    sequence: Annotated[int | None, _Option(min=1, help="Tokens of an example, for a config; default: 2048.")] = None,
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
    measure: Annotated[
        bool | None,
        _Option(
            help="Measure the bits of levels that adapt on the batch: default for a function, whose batch is a job's; "
            "never with --fake or --layout."
        ),
    ] = None,
    shown: Annotated[str | None, _Option("--show", help="The level whose modules and lines are listed.")] = None,
    rows: Annotated[int, _Option(min=1, help="Rows of each table.")] = 12,
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
            measure=_is_function(target) if measure is None else measure,
        )  # fmt: skip
        levels = level or list(DEFAULT_LEVELS)
        if shown is not None and shown not in levels:
            raise ProfileError(f"--show is {shown!r}, expected one of the levels: {', '.join(levels)}")
        build = _builder(target, batch_size, sequence, settings)
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


def _builder(
    target: str, batch_size: int | None, sequence: int | None, settings: Settings
) -> Callable[[], tuple[nn.Module, Any, Any]]:
    """What builds the job, each time anew."""
    if not _is_function(target):
        config = _config(target)
        return lambda: _parts(_job_of_config(config, batch_size or 1, sequence, settings))
    function = load_function(target)

    def build() -> tuple[nn.Module, Any, Any]:
        with UserCode(f"{target}()"):
            made = with_small_values(function)
        if _is_config(made):
            return _parts(_job_of_config(made, batch_size or 1, sequence, settings))
        if batch_size is not None or sequence is not None:
            raise CommandError(
                f"--batch-size or --sequence was given and {target} returns a batch of its own, expected one of them: "
                "they are for a config of transformers"
            )
        return _parts(job_of(target, made))

    return build


def _is_function(target: str) -> bool:
    """Whether a target is a function, and no config, of which weights and batch have no values of a job's."""
    return ":" in target or target.endswith(".py")


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
        expected = "expected a folder with config.json, a JSON file of a config, or MODULE:FUNCTION"
        if not target or not Path(target).exists():
            raise CommandError(f"the config {target!r} is not on this machine, {expected}") from None
        reason = (str(error).strip().splitlines() or [""])[0]
        raise CommandError(f"the config {target!r} cannot be read, {expected}: {reason}") from None


def _job_of_config(config: Any, batch_size: int, sequence: int | None, settings: Settings) -> Job:
    """A model of random weights: a language model, whose labels are its tokens, or a classifier of images."""
    config.use_cache = False  # of keys and values, which no training step reads
    config.architectures = config.architectures or []  # transformers reads them where a kind has several models
    kind, batch_of = _kind_of(config)
    if not settings.is_fake:
        _check_fits(kind, config)
    model = with_small_values(lambda: kind.from_config(config))
    return Job(model, batch_of(config, batch_size, sequence), lambda batch: loss_of(model, batch))


def _tokens(config: Any, batch_size: int, sequence: int | None) -> dict[str, Tensor]:
    tokens = torch.zeros((batch_size, sequence or _SEQUENCE), dtype=torch.long, device="cpu")
    batch = {"input_ids": tokens, "labels": tokens}
    return {**batch, "decoder_input_ids": tokens} if config.is_encoder_decoder else batch


def _images(config: Any, batch_size: int, sequence: int | None) -> dict[str, Tensor]:
    if sequence is not None:
        raise CommandError(
            f"--sequence was given and a {type(config).__name__} has images of its own size, expected --batch-size "
            "alone"
        )
    size = getattr(config, "image_size", None) or _IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    images = torch.zeros((batch_size, config.num_channels, height, width), device="cpu")
    return {"pixel_values": images, "labels": torch.zeros(batch_size, dtype=torch.long, device="cpu")}


def _kind_of(config: Any) -> tuple[Any, Callable[[Any, int, int | None], dict[str, Tensor]]]:
    """The transformers class that makes the model of a config, and what makes its batch. See _language_model()."""
    import transformers

    images = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    if type(config) in images and hasattr(config, "num_channels"):
        return transformers.AutoModelForImageClassification, _images
    return _language_model(config), _tokens


def _language_model(config: Any) -> Any:
    """The transformers class that makes the model of a config: as it was trained, else causal."""
    import transformers

    kind, models = "CausalLM", transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder:
        kind, models = "Seq2SeqLM", transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    elif any(name.endswith("ForMaskedLM") for name in config.architectures or ()):
        kind, models = "MaskedLM", transformers.MODEL_FOR_MASKED_LM_MAPPING
    if type(config) not in models:
        raise CommandError(
            f"a {type(config).__name__} is no config of a language model that transformers trains on tokens alone, nor "
            "of a classifier of images: write a function that returns (model, batch), and pass MODULE:FUNCTION"
        )
    return getattr(transformers, f"AutoModelFor{kind}")


def _check_fits(kind: Any, config: Any) -> None:
    """Raise CommandError where the weights of a config and their gradients alone are more than this machine has."""
    with torch.device("meta"):
        least = 2 * sum(parameter.nbytes for parameter in kind.from_config(config).parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if least > there:
        raise CommandError(
            f"weights and gradients of this config take {shown_bytes(least)} and this machine has "
            f"{shown_bytes(there)}: give --fake, which takes none, or --layout"
        )


# -- tables ------------------------------------------------------------------------------------------------------------


def _tables(target: str, found: Profile, chosen: LevelProfile, rows: int) -> Iterable[RenderableType]:
    where = f"rank 0 of {found.world_size}, {found.layout}" if found.layout else "one rank"
    how = "fake tensors" if found.fake else "measured on the job's own tensors"
    yield f"[bold]{escape(target)}[/]: {found.parameters:,} parameters, {where}, {how}\n"
    yield _levels(found)
    yield _kinds(found)
    yield _over_time(found)
    title = f"under {chosen.level}, by"
    yield _shares(f"{title} module", "(the model itself)", _together(chosen.modules), rows)
    yield _shares(f"{title} operator", "(before the step)", chosen.operators, rows)
    yield _shares(f"{title} line", "(none: parameters, optimizer)", chosen.lines, rows)
    if any(level.tensors for level in found.levels):
        yield _tensors(found, rows)
    for note in found.notes:
        yield f"[dim]{escape(note)}[/]"


def _levels(found: Profile) -> Table:
    exact = max(level.exact_bytes for level in found.levels)
    divisor, unit = unit_of(max(level.peak_bytes for level in found.levels))
    table = _compact("level", "peak", "forward", "backward", "optimizer", "kept", "", "on host")
    for level in found.levels:
        kept = level.retained_bytes if level.tensors else exact
        phases = (level.phase_peaks.get(name, 0) for name in ("forward", "backward", "optimizer"))
        sizes = [f"{size / divisor:.1f}" for size in (level.peak_bytes, *phases)]
        share = [f"{kept / divisor:.1f}", f"{kept / exact:.0%}"] if exact else ["-", ""]
        table.add_row(level.level, *sizes, *share, f"{level.without_optimizer_bytes / divisor:.1f}")
    table.title = f"peak of live memory, and of each phase ({unit})"
    table.caption = "kept: activations for backward. on host: the peak with the optimizer on the CPU."
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


def _compact(first: str, *numbers: str, digits: int = 6) -> Table:
    """A table whose numbers are never cut, however narrow the terminal is. digits: of the longest, with its point."""
    return _table(_name(first), *(_number(heading, digits if heading else 4) for heading in numbers))


def _table(*columns: Column) -> Table:
    """A table as wide as its narrowest columns need, or wider."""
    least = sum((column.min_width or 0) + 2 for column in columns) + 1  # what stands between and around them
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), min_width=least)


def _name(heading: str) -> Column:
    return Column(heading, overflow="fold", min_width=_NAME_WIDTH)


def _number(heading: str, digits: int = 7) -> Column:
    return Column(heading, justify="right", no_wrap=True, min_width=max(len(heading), digits))


def _over_time(found: Profile) -> Table:
    """One line of bars a level, from the first operator of the step to its last."""
    highest = max(level.peak_bytes for level in found.levels)
    bars = Column("live memory, from the first operator of a step to the last", min_width=_WIDTH, no_wrap=True)
    table = _table(Column("level", min_width=_LEVEL_WIDTH), bars)
    table.title = "over the time of a step"
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
    divisor, unit = unit_of(max((share.peak_bytes for share in shares), default=0))
    table = _table(_name(""), _number("at the peak"), Column("of it", min_width=_KIND_WIDTH), _number("kept"))
    table.title = f"{title} ({unit})"
    for share in shares[:rows]:
        kept = f"{share.kept_bytes / divisor:.2f}" if share.kept else "-"
        name = escape(share.name or nameless)
        table.add_row(name, f"{share.peak_bytes / divisor:.2f}", _largest(share.peak), kept)
    rest = shares[rows:]
    if rest:
        peak_bytes, kept_bytes = sum(one.peak_bytes for one in rest), sum(one.kept_bytes for one in rest)
        row = f"[dim]{len(rest)} more[/]", f"{peak_bytes / divisor:.2f}", "", f"{kept_bytes / divisor:.2f}"
        table.add_row(*row)
    return table


def _largest(sizes: dict[str, int]) -> str:
    """The kinds that most of it is."""
    total = sum(sizes.values())
    most = sorted(sizes.items(), key=lambda item: -item[1])
    most = most[: 1 if most and most[0][1] >= 0.95 * total else 2]
    named = ((_SHORT_KINDS.get(kind, kind), size / total) for kind, size in most if total)
    return ", ".join(f"{kind} {share:.0%}" for kind, share in named if share >= 0.01)


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
            how[key][name] = "" if tensor.codec in ("quantised", "exact") else f"\n{tensor.codec}"
            if key not in about or (tensor.why_exact and not about[key].why_exact):
                about[key] = tensor
    keys = sorted(kept, key=lambda key: -max(kept[key].values()))
    divisor, unit = unit_of(max((max(kept[key].values()) for key in keys), default=0))
    table = _compact("saved tensor", *levels, digits=7)
    table.title = f"what each level keeps of what autograd saves ({unit}; * stands for numbers)"
    for key in keys[:rows]:
        cells = (f"{kept[key][name] / divisor:.2f}{how[key].get(name, '')}" for name in levels)
        table.add_row(_about(key, about[key]), *cells)
    if len(keys) > rows:
        rest = (f"{sum(kept[key][name] for key in keys[rows:]) / divisor:.2f}" for name in levels)
        table.add_row(f"[dim]{len(keys) - rows} more[/]", *rest)
    return table


def _about(name: str, tensor: KeptTensor) -> str:
    """Its name, its shape and type, and why it is stored exactly."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    why = f"\n[dim]exact: {escape(tensor.why_exact)}[/]" if tensor.why_exact else ""
    return f"{escape(name)}\n[dim]{shape} {tensor.dtype}[/]{why}"


def _distinct(levels: Sequence[LevelProfile]) -> dict[str, LevelProfile]:
    """Levels by their names; those that keep the same are one."""
    found: dict[tuple[KeptTensor, ...], list[LevelProfile]] = defaultdict(list)
    for level in levels:
        found[level.tensors].append(level)
    return {", ".join(one.level for one in same): same[0] for same in found.values()}
