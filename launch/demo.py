"""Train one config twice under torchrun, untouched and compressed, with one seed; then a table and a picture.

launch/demo.sh sets up the environment and calls this. Results go to runs/demo/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Started as a file (torchrun needs one), Python looks beside it and not in the root: hence E402 below.
sys.path.insert(0, str(ROOT))

from launch import data, train  # noqa: E402
from launch.config import UsageError, load_config  # noqa: E402
from launch.summary import plot, table  # noqa: E402


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = train.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="text", help="name of a file in configs/ (default: text)")
    parser.add_argument("--level", default="L2", help="level of the compressed run (default: L2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of the config's")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    try:
        options = parse(arguments)
        if options.level == train.OFF:
            raise UsageError(f"level {train.OFF} is the untouched run itself: give a level that compresses, such as L2")
        data.fetch(load_config(options.config).task)
        for level in (train.OFF, options.level):
            train.check(train.parse(_run_arguments(options, level)), options.ranks)
        untouched, compressed = (_run(options, level) for level in (train.OFF, options.level))
    except UsageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    _write(options.output, untouched, compressed)
    return 0


def _run_arguments(options: argparse.Namespace, level: str) -> list[str]:
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    output = ["--output", str(options.output / level)]
    return ["--config", options.config, "--level", level, "--seed", str(options.seed), *steps, *output]


def _run(options: argparse.Namespace, level: str) -> dict[str, Any]:
    """One run of launch/train.py on all ranks; its result.json."""
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += [str(ROOT / "launch" / "train.py"), *_run_arguments(options, level)]
    done = subprocess.run(command, env={"OMP_NUM_THREADS": str(threads), **os.environ})
    if done.returncode:
        raise UsageError(f"the run with level {level} ended with status {done.returncode}: see its messages above")
    return json.loads((options.output / level / "result.json").read_text())


def _write(folder: Path, untouched: dict[str, Any], compressed: dict[str, Any]) -> None:
    results = {"untouched": untouched, "compressed": compressed}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(untouched, compressed, folder / "demo.png")
    print(f"\n{table(untouched, compressed)}\n\n{folder / 'results.json'}\n{folder / 'demo.png'}")


if __name__ == "__main__":
    sys.exit(main())
