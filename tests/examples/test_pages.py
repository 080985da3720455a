"""Every example in Python on the pages is run: programs on two ranks, snippets beside a small job of their own."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from script_ranks import run_script
from torch import nn
from torch.nn.functional import cross_entropy

import gact_dist

ROOT = Path(__file__).resolve().parents[2]
TESTED_ELSEWHERE = {"frameworks"}  # lines of the programs that tests/frameworks runs, as a test below sees to
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.stem not in TESTED_ELSEWHERE]
BLOCK = re.compile(r"^(<!-- not run by the tests: .*? -->\n)?```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.?\d*(?:e[+-]?\d+)?")
TOLERANCE = 0.2  # of a printed number: other processors round and order sums otherwise


class Example(NamedTuple):
    """A block of Python on a page."""

    name: str
    code: str
    printed: str
    """what the page says it prints; empty where the page does not say"""
    not_run: bool

    @property
    def is_program(self) -> bool:
        """Whether it starts ranks of its own."""
        return "init_process_group" in self.code or "init_distributed" in self.code


def examples() -> list[Example]:
    found = []
    for page in PAGES:
        blocks = [*BLOCK.findall(page.read_text()), ("", "", "")]
        for number, ((not_run, language, code), (_, next_language, text)) in enumerate(pairwise(blocks), start=1):
            if language == "python":
                printed = text if next_language == "text" else ""
                found.append(Example(f"{page.stem}-{number}", code, printed, bool(not_run)))
    return found


RUN = [example for example in examples() if not example.not_run]
PROGRAMS = [example for example in RUN if example.is_program]
SNIPPETS = [example for example in RUN if not example.is_program]


def job() -> dict[str, Any]:
    """What a snippet may take for granted: a model, an optimizer, a loss function and batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 4))
    model.blocks = [model[0], model[3]]
    loader = [(torch.randn(32, 32), torch.randint(4, (32,))) for _ in range(2)]
    return {
        "gact_dist": gact_dist,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": loader,
        "enumerated_loader": [(torch.arange(32), batch) for batch in loader],
        "loss_fn": lambda batch: cross_entropy(model(batch[0]), batch[1]),
    }


def test_the_pages_have_examples_and_few_that_cannot_be_run():
    assert len(PROGRAMS) >= 5
    assert len(SNIPPETS) >= 10
    lines_of_a_job = ["command_line-2", "command_line-3"]  # which tests/cli and tests/test_run_log.py run
    assert [example.name for example in examples() if example.not_run] == [*lines_of_a_job, "offload-1"]


def test_the_lines_on_the_page_on_frameworks_are_those_of_the_programs_that_it_names():
    sections = (ROOT / "docs" / "frameworks.md").read_text().split("\n## ")
    for section in sections:
        named = re.findall(r"`(examples/\w+\.py)`", section) or ["examples/hf_trainer.py"]  # before the first section
        program = "".join((ROOT / path).read_text() for path in named)
        code = "".join(code for _, language, code in BLOCK.findall(section) if language == "python")
        lines = [line.split("  #")[0].split("..., ")[-1].rstrip(")") for line in code.splitlines()]
        assert [line for line in lines if line not in program] == []
    assert len(sections) > 6


@pytest.mark.parametrize("example", PROGRAMS, ids=lambda example: example.name)
def test_a_program_on_a_page_trains_and_compresses(example, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(example.code)
    ratio = re.findall(r"ratio (\S+)$", run_script(script), re.MULTILINE)
    assert float(ratio[0]) > 2


@pytest.mark.parametrize("example", SNIPPETS, ids=lambda example: example.name)
def test_a_snippet_on_a_page_runs_and_the_job_trains_on(example, capsys):
    names = job()
    model = names["model"]
    exec(compile(example.code, example.name, "exec"), names)
    printed = capsys.readouterr().out
    if example.printed:
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", example.printed)
        expected = [float(number) for number in NUMBER.findall(example.printed)]
        assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(expected, rel=TOLERANCE)
    if names["model"] is model:
        loss = names["loss_fn"](names["loader"][0])
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
