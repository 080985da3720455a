"""Train one of the example models, with or without gact_dist: in one process, under torchrun or under deepspeed.

    python -m examples.train --config image
    torchrun --standalone --nproc-per-node 2 -m examples.train --config text --level L2 --output runs/text
    deepspeed --num_gpus 2 --module examples.train --config text --deepspeed configs/deepspeed/zero2.json

Rank 0 writes two files to the output folder. result.json has the losses, accuracy, step times, peak memory, memory
report and plan of the run. history.jsonl has one line for each adaptation: the bits and sensitivity of every tensor.
gact_dist writes its log of the run beside them, and `gact-dist report FOLDER` makes a page of all. At the end it says
what came out.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from .config import ROOT, RunConfig, UsageError, load_config

OFF = "L0"


class Parser(argparse.ArgumentParser):
    """A parser that raises: argparse itself would print its usage and exit on every rank."""

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`, which rank 0 prints as one line."""
        raise UsageError(f"{message} (--help lists the options)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="text", help="a name in configs/train/, or a .toml file (default: text)")
    parser.add_argument("--level", default="L2", help="optimisation level; L0 trains without gact_dist (default: L2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and dropout (default: 0)")
    parser.add_argument("--steps", type=int, help="number of optimizer steps, in place of the config's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the config")
    parser.add_argument("--output", type=Path, help="output folder (default: runs/CONFIG-LEVEL-SEED)")
    parser.add_argument("--deepspeed", type=Path, metavar="FILE", help="train with DeepSpeed and this JSON config")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # some launchers add it
    parser.add_argument("--check", type=int, metavar="RANKS", help="only check that a run on RANKS ranks could start")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "runs" / f"{Path(options.config).stem}-{options.level}-{options.seed}"
    return options


def check(options: argparse.Namespace, world_size: int) -> RunConfig:
    """The config of the run. Raises `UsageError` for every mistake of the user, before any work is done."""
    steps = [f"steps={options.steps}"] if options.steps is not None else []
    config = load_config(options.config, [*options.set, *steps])
    config.check_world_size(world_size)
    if options.level != OFF:
        _settings(options, config)
    if options.deepspeed is not None:
        from .jobs import check_dtype, read_ds_config

        check_dtype(read_ds_config(options.deepspeed), options.deepspeed, config.task)
    from . import data

    data.require(config.task)
    return config


def _settings(options: argparse.Namespace, config: RunConfig):
    """The run's `gact_dist.Config`. Not called at level L0, which must not import the library."""
    import gact_dist
    from gact_dist.offload import require_cuda

    try:
        settings = gact_dist.Config.from_level(
            options.level,
            adapt_interval=config.adapt_interval,
            calibration_samples=config.calibration_samples,
            seed=options.seed,
            run_dir=str(options.output),
        )
        if settings.offload.enabled:
            require_cuda()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Run this rank. Returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        options = parse(arguments)
        check(options, options.check or int(os.environ.get("WORLD_SIZE", 1)))
        if options.check is None:
            run(options)
    except UsageError as error:
        return _refuse(error)
    return 0


def _refuse(error: UsageError) -> int:
    """Print the message on rank 0. The others wait: torchrun would kill rank 0 as soon as one of them exits."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"train: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(30)
    return 2


def run(options: argparse.Namespace) -> None:
    """Train, evaluate, and write the results on rank 0."""
    from .loop import train
    from .ranks import Ranks
    from .results import closing, write_result

    ranks = Ranks.from_environment()
    config = check(options, ranks.world_size)
    device = ranks.device()
    settings = None if options.level == OFF else _settings(options, config)
    with ranks.group(device):
        measured = train(
            config,
            ranks,
            device,
            seed=options.seed,
            settings=settings,
            title=options.level,
            deepspeed=options.deepspeed,
        )
        gc.collect()
    if ranks.rank == 0:
        path = write_result(
            options.output, config=config, options=options, ranks=ranks, device=device, measured=measured
        )
        print(closing(measured, path), flush=True)
