"""Train the same job twice under torchrun, untouched and compressed; then print a table and draw a picture.

launch/demo.sh sets up the environment and runs `python -m examples.train.demo`. Results go to runs/demo/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gact_dist.cli.stopping import exit_code_of, terminated_as_interrupted

from . import data, train
from .config import ROOT, UsageError, load_config
from .summary import plot, table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = train.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="text", help="a name in configs/train/, or a .toml file (default: text)")
    parser.add_argument("--level", default="L2", help="level of the compressed run (default: L2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs (default: 0)")
    parser.add_argument("--steps", type=int, help="number of optimizer steps, in place of the config's")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "demo", help="output folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo. Returns the exit status."""
    try:
        options = parse(arguments)
        if options.level == train.OFF:
            raise UsageError(f"level {train.OFF} does not compress: give another level to compare with, such as L2")
        data.fetch(load_config(options.config).task)
        for level in (train.OFF, options.level):
            train.check(train.parse(_run_arguments(options, level)), options.ranks)
        untouched, compressed = (_run(options, level) for level in (train.OFF, options.level))
    except UsageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("demo: stopped", file=sys.stderr)
        return exit_code_of(stopped)
    _write(options.output, untouched, compressed)
    return 0


def _run_arguments(options: argparse.Namespace, level: str) -> list[str]:
    steps = [] if options.steps is None else ["--steps", str(options.steps)]
    output = ["--output", str(options.output / level)]
    return ["--config", options.config, "--level", level, "--seed", str(options.seed), *steps, *output]


def _run(options: argparse.Namespace, level: str) -> dict[str, Any]:
    """Train once, on all ranks. Returns the contents of result.json."""
    threads = max(1, (os.cpu_count() or 1) // options.ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += ["-m", "examples.train", *_run_arguments(options, level)]
    print(f"demo: training {'untouched' if level == train.OFF else f'with level {level}'}", flush=True)
    status = status_of(command, {"OMP_NUM_THREADS": str(threads), **os.environ})
    if status:
        raise UsageError(f"the run with level {level} failed with status {status}: its messages are above")
    return json.loads((options.output / level / "result.json").read_text())


def status_of(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run a launcher. Where this process is stopped, by Ctrl-C or SIGTERM, the launcher ends its ranks first."""
    with terminated_as_interrupted(), subprocess.Popen(command, env=environment) as running:
        try:
            return running.wait()
        finally:
            running.terminate()  # a kill would leave the ranks; where it has ended this does nothing
            running.wait()


def _write(folder: Path, untouched: dict[str, Any], compressed: dict[str, Any]) -> None:
    results = {"untouched": untouched, "compressed": compressed}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(untouched, compressed, folder / "demo.png")
    print(f"\n{table(untouched, compressed)}\n\nresults: {folder / 'results.json'}\npicture: {folder / 'demo.png'}")


if __name__ == "__main__":
    sys.exit(main())
