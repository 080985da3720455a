"""Train one of the example models, with or without gact_dist, in one process, under torchrun or deepspeed.

    torchrun --standalone --nproc-per-node 2 launch/train.py --config text --level L2 --output runs/text
    deepspeed --num_gpus 2 launch/train.py --config text --deepspeed configs/deepspeed/zero2.json

Rank 0 writes result.json into the output folder: losses, accuracy, step time, memory, the report and the plan;
history.jsonl has the bits and sensitivities of every adaptation.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
# Started as a file (torchrun needs one), Python looks beside it and not in the root: hence E402 below.
sys.path.insert(0, str(ROOT))

from launch.config import RunConfig, UsageError, load_config  # noqa: E402

OFF = "L0"


class Parser(argparse.ArgumentParser):
    """argparse prints usage and exits on every rank; a mistake is one line of rank 0 instead."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting."""
        raise UsageError(f"{message} (--help lists the options)")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="text", help="name of a file in configs/, or a .toml file (default: text)")
    parser.add_argument("--level", default="L2", help="optimisation level; L0 trains untouched (default: L2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation, data order and dropout")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the config's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    parser.add_argument("--output", type=Path, help="folder of result.json (default: runs/CONFIG-LEVEL-SEED)")
    parser.add_argument("--deepspeed", type=Path, metavar="FILE", help="train through DeepSpeed with this JSON config")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # some launchers add it
    parser.add_argument("--check", type=int, metavar="RANKS", help="only check that a run on RANKS ranks can start")
    options = parser.parse_args(arguments)
    if options.output is None:
        options.output = ROOT / "runs" / f"{Path(options.config).stem}-{options.level}-{options.seed}"
    return options


def check(options: argparse.Namespace, world_size: int) -> RunConfig:
    """The config of a run that can start. Raises `UsageError` for everything that a user can mend, before any work."""
    steps = [f"steps={options.steps}"] if options.steps is not None else []
    config = load_config(options.config, [*options.set, *steps])
    config.check_world_size(world_size)
    if options.level != OFF:
        _settings(options, config)
    if options.deepspeed is not None:
        from launch.jobs import check_dtype, read_ds_config

        check_dtype(read_ds_config(options.deepspeed), options.deepspeed, config.task)
    from launch import data

    data.require(config.task)
    return config


def _settings(options: argparse.Namespace, config: RunConfig):
    """gact_dist's own settings of this run; level L0 never comes here and never imports the library."""
    import gact_dist
    from gact_dist.offload.manager import require_cuda

    try:
        settings = gact_dist.Config.from_level(
            options.level,
            adapt_interval=config.adapt_interval,
            calibration_samples=config.calibration_samples,
            seed=options.seed,
        )
        if settings.offload.enabled:
            require_cuda()
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Run one rank; returns the exit status."""
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
    """Print the one line on rank 0. The other ranks wait: torchrun ends all ranks as soon as one of them has ended."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"train: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(30)
    return 2


def run(options: argparse.Namespace) -> None:
    """Train, measure, and write result.json on rank 0."""
    from launch.ranks import Ranks
    from launch.results import write_result
    from launch.training import train

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
        write_result(options.output, config=config, options=options, ranks=ranks, device=device, measured=measured)


if __name__ == "__main__":
    sys.exit(main())
