"""Which cases a run of all files takes: [Note: which cases run] in conftest.py."""

from __future__ import annotations

import ast
import itertools
from types import SimpleNamespace
from typing import Any

import conftest
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

    def __init__(self, **params: Any) -> None:
        self.callspec = SimpleNamespace(params=params)


def grid(**values: list[Any]) -> list[Case]:
    return [Case(**dict(zip(values, combination, strict=True))) for combination in itertools.product(*values.values())]


def test_every_value_comes_as_early_as_can_be():
    cases = grid(dtype=["fp32", "bf16", "fp16"], bits=[1, 2, 4, 8], follows=[False, True])
    chosen = conftest.covering(cases, 4)
    assert len({id(case) for case in chosen}) == 4
    for name in ("dtype", "bits", "follows"):
        seen = {case.callspec.params[name] for case in chosen}
        assert seen == {case.callspec.params[name] for case in cases}


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (6, 6), (9, 6)])
def test_as_many_are_chosen_as_were_asked_for(count, chosen):
    assert len(conftest.covering(grid(a=[0, 1, 2], b=["x", "y"]), count)) == chosen


def test_functions_of_several_cases_that_take_long_are_written_down(tmp_path):
    (tmp_path / "run.xml").write_text(REPORT)
    assert seconds.seconds(tmp_path / "run.xml") == {"tests/hooks/test_a.py::test_long": 5.0}


def test_every_function_that_was_timed_is_there():
    functions: dict[str, set[str]] = {}
    for name in conftest.SECONDS:
        file, function = name.split("::")
        if file not in functions:
            tree = ast.parse((conftest.TESTS.parent / file).read_text())
            functions[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions[file], f"{name} is gone: take it out of tests/seconds.json"
