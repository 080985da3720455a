"""Runs the random cases of a fuzz, one for each seed."""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.reliability import results


def parser_of(text: str | None, entry: str) -> argparse.ArgumentParser:
    """text: of the script. entry: in the file of results."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next has the next number")
    parser.add_argument("--json", type=Path, help=f"file of results, in which the entry {entry!r} is replaced")
    return parser


def run(
    arguments: argparse.Namespace,
    entry: str,
    check: Callable[[int, collections.Counter[str]], str | None],
    **about: bool,
) -> None:
    """Run the cases that the arguments ask for, show and keep what was found, and exit with 1 if anything was.

    check(seed, counts): what differs in a case, None if nothing does; adds to the counts. about: kept with the figures.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    found, start = [], time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        difference = check(seed, counts)
        if difference is not None:
            found.append(difference)
            print(difference, flush=True)
        if counts["cases"] % 1000 == 0:
            print(f"{counts['cases']} cases, {len(found)} differences", flush=True)
    seconds = round(time.perf_counter() - start)
    counted = dict(sorted(counts.items()))
    figures = {"seed": arguments.seed, **about, "seconds": seconds, **counted, "differences": found}
    print(json.dumps(figures, indent=1))
    if arguments.json:
        results.write(arguments.json, entry, figures)
    sys.exit(bool(found))
