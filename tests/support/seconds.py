"""Which cases a run of all files takes.

[Note: which cases run] A run of all files is to take some ten minutes on two cores. So of the cases of a function that
takes long only as many run as have time: their order is that in which every value of every parameter comes as early as
can be. ../seconds.json says how long functions take with all their cases; what is not in it, or marked `whole`, runs
whole. So does a run of some files, or of names (-k), and --all, which also runs what is marked `large`. To write it:

    bash launch/test.sh --all --junitxml=run.xml && python tests/support/seconds.py run.xml
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

FILE = Path(__file__).parents[1] / "seconds.json"
SECONDS_OF_A_FUNCTION = 1.0


def recorded() -> dict[str, float]:
    """Seconds by function, as "file::name"."""
    return json.loads(FILE.read_text())


def in_time(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that a run of all files takes."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    taken, chosen = recorded(), []
    for function, every in cases.items():
        if function in taken and len(every) > 1 and not every[0].get_closest_marker("whole"):
            every = covering(every, max(1, int(len(every) * SECONDS_OF_A_FUNCTION / taken[function])))
        chosen += every
    return chosen


def covering(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases of one function: next is always one with the most values that no earlier one has."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    while len(chosen) < min(count, len(cases)):
        best = max((case for case in cases if case not in chosen), key=lambda case: len(values[case] - seen))
        chosen.append(best)
        seen |= values[best]
    return chosen


def measured(report: Path) -> dict[str, float]:
    """Seconds by function, of those with several cases that have not all time; report: in JUnit's XML."""
    taken: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        function = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        taken[function] += float(case.attrib["time"])
        cases[function] += 1
    return {
        name: round(taken[name], 1) for name in sorted(taken) if cases[name] > 1 and taken[name] > SECONDS_OF_A_FUNCTION
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(measured(Path(sys.argv[1])), indent=2) + "\n")
