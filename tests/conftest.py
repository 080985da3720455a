"""What all tests share: the ranks fixture, the folder of its module, --all, and the bound on skipped tests."""

from __future__ import annotations

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case, and the tests marked large")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    import seconds

    everything = config.args == config.getini("testpaths") and not config.getoption("keyword")
    small = [item for item in items if not item.get_closest_marker("large")]
    run = set(seconds.in_time(small) if everything else small)
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


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


@pytest.fixture(params=["by its frame", "by what it saves"])
def met(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a call of a custom function is met: only the second where Function.apply has no frame (torch 2.14)."""
    from gact_dist.hooks import call_stack, function_calls, functions_again

    if request.param == "by what it saves":
        for module in (call_stack, function_calls, functions_again):
            monkeypatch.setattr(module, "APPLY_HAS_FRAME", False)
        monkeypatch.setattr(call_stack, "call_of_frame", lambda frame: None)
        monkeypatch.setattr(function_calls, "_APPLY_CODE", None)


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
