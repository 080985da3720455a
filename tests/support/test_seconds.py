"""Which cases a run of all files takes: [Note: which cases run] in seconds.py."""

from __future__ import annotations

import ast
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import seconds

REPORT = """<testsuites><testsuite>
<testcase classname="tests.hooks.test_a" name="test_long[1]" time="2.0" />
<testcase classname="tests.hooks.test_a" name="test_long[2]" time="3.0" />
<testcase classname="tests.hooks.test_a" name="test_short[1]" time="0.2" />
<testcase classname="tests.hooks.test_a" name="test_short[2]" time="0.2" />
<testcase classname="tests.hooks.test_a" name="test_single" time="9.0" />
</testsuite></testsuites>"""


class Case:
    """What is read of pytest.Item."""

    def __init__(self, nodeid: str = "a.py::test_a[0]", **params: Any) -> None:
        self.nodeid, self.callspec = nodeid, SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> None:
        return None


def grid(**values: list[Any]) -> list[Case]:
    return [Case(**dict(zip(values, combination, strict=True))) for combination in itertools.product(*values.values())]


def test_every_value_comes_as_early_as_can_be():
    cases = grid(dtype=["fp32", "bf16", "fp16"], bits=[1, 2, 4, 8], follows=[False, True])
    chosen = seconds.covering(cases, 4)
    assert len({id(case) for case in chosen}) == 4
    for name in ("dtype", "bits", "follows"):
        seen = {case.callspec.params[name] for case in chosen}
        assert seen == {case.callspec.params[name] for case in cases}


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (6, 6), (9, 6)])
def test_as_many_are_chosen_as_were_asked_for(count, chosen):
    assert len(seconds.covering(grid(a=[0, 1, 2], b=["x", "y"]), count)) == chosen


def test_a_function_that_takes_long_has_fewer_cases_and_the_others_all(monkeypatch):
    long = 5 * seconds.SECONDS_OF_A_FUNCTION
    monkeypatch.setattr(seconds, "recorded", lambda: {"a.py::test_long": long, "c.py::test_plain_by_now": long})
    named = [("a.py::test_long", range(10)), ("a.py::test_other", range(3)), ("b.py::test_short", range(4))]
    plain = SimpleNamespace(nodeid="c.py::test_plain_by_now")  # what has no parameters has no callspec
    items: list[Any] = [plain] + [
        Case(f"{name}[{number}]", number=number) for name, numbers in named for number in numbers
    ]
    run = [item.nodeid.partition("[")[0] for item in seconds.in_time(items)]
    assert (
        run
        == ["c.py::test_plain_by_now"] + ["a.py::test_long"] * 2 + ["a.py::test_other"] * 3 + ["b.py::test_short"] * 4
    )


def test_functions_of_several_cases_that_take_long_are_written_down(tmp_path):
    (tmp_path / "run.xml").write_text(REPORT)
    assert seconds.measured(tmp_path / "run.xml") == {"tests/hooks/test_a.py::test_long": 5.0}


def test_every_function_that_was_timed_is_there():
    functions: dict[str, set[str]] = {}
    for name in seconds.recorded():
        file, function = name.split("::")
        if file not in functions:
            tree = ast.parse((seconds.FILE.parents[1] / file).read_text())
            functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions[file], f"{name} is gone: take it out of tests/seconds.json"
