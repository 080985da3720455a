"""What all tests share: the ranks fixture, the folder of its module, which cases run, and the bound on skipped tests.

[Note: which cases run] A run of all files is to take ten minutes on two cores. So of the cases of a function that takes
long only as many run as have time: their order is that in which every value of every parameter comes as early as can
be. seconds.json says how long functions take with all their cases; what is not in it, or marked `whole`, runs whole. So
does a run of some files, or of names (-k), and --all, which also runs what is marked `large`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test modules import helpers by their names, wherever they stand; spawned ranks receive this path as well.
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS / folder) for folder in ("support", "distributed", "sensitivity", "policies")]

# Tensors in tests are small: threads gain nothing, and cost four times the time where the cores are busy. test_ops.py
# sets their number where it matters.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# DeepSpeed compiles operators at their first use. The folder for it is this checkout's own: torch waits without end for
# the lock that a killed build leaves there, whoever's it was.
EXTENSIONS = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).parents[1] / ".cache/extensions")))
LONGEST_BUILD_S = 300
# And the ninja is this environment's, as in the launchers: another version would compile all of them anew.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

# More skips than this fail a run in CI: a check that silently stops running is worse than a red one.
MAXIMUM_SKIPPED_IN_CI = 10


# See [Note: which cases run]. Written by `python tests/support/seconds.py`.
SECONDS: dict[str, float] = json.loads((TESTS / "seconds.json").read_text())
SECONDS_OF_A_FUNCTION = 1.5


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, and the tests marked large")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left = {item for item in items if item.get_closest_marker("large")}
    if config.args == config.getini("testpaths") and not config.getoption("keyword"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if item not in left and not item.get_closest_marker("whole"):
                cases.setdefault(function_of(item.nodeid), []).append(item)
        for function in SECONDS.keys() & cases.keys():
            every = cases[function]
            count = max(1, int(len(every) * SECONDS_OF_A_FUNCTION / SECONDS[function]))
            left |= set(every) - set(covering(every, count))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def covering(cases: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of the cases of one function: next is always one with the most values that no earlier one has."""
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    chosen: list[pytest.Item] = []
    seen: set[tuple[str, int]] = set()
    while len(chosen) < min(count, len(cases)):
        best = max((case for case in cases if case not in chosen), key=lambda case: len(values[case] - seen))
        chosen.append(best)
        seen |= values[best]
    return chosen


def pytest_sessionstart(session: pytest.Session) -> None:
    for lock in EXTENSIONS.rglob("lock"):
        if time.time() - lock.stat().st_mtime > LONGEST_BUILD_S:
            lock.unlink()


@pytest.fixture(autouse=True)
def _says_all_again() -> None:
    """What was said once in an earlier test is said again."""
    logs = sys.modules.get("gact_dist.distributed.logs")
    if logs is not None:
        logs._said.clear()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """run_ranks(function, *args, world_size=2, timeout_s=120): see support/ranks.py."""
    import ranks as pool

    yield pool.run_ranks
    pool.close_pools()


def _skipped(config: pytest.Config) -> int:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return 0 if reporter is None else len(reporter.stats.get("skipped", []))


def _too_many_skipped(config: pytest.Config) -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true") and _skipped(config) > MAXIMUM_SKIPPED_IN_CI


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _too_many_skipped(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    line = f"skipped tests: {_skipped(config)} (at most {MAXIMUM_SKIPPED_IN_CI} in CI)"
    if _too_many_skipped(config):
        line += "; too many, this run fails"
    terminalreporter.write_line(line)
