"""A part that is differentiated in sections: the numbers are those of the part as a whole."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from block_models import CASES, gpt2_with_labels, made
from test_blocks import RELATIVE, SAMPLED, as_one_part, distance, measured

import gact_dist
from gact_dist import Config
from gact_dist.sensitivity import one_pass, sections, walk

# bfloat16 sums of gradients at a border are rounded where those inside of a graph are not: by 2^-9 of an element at
# most, of its square twice that.
TOLERANCES = {"autocast": 2.0**-8}


def counted(function, counts, *arguments):
    found = function(*arguments)
    counts.append(len(found))
    return found


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_sections_give_the_numbers_of_the_whole(name, in_blocks, monkeypatch):
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", None)
    whole = as_one_part(lambda: made(name), monkeypatch)
    counts = []
    for function in (walk.divided, walk.divided_open):
        monkeypatch.setattr(walk, function.__name__, partial(counted, function, counts))
    monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    by_section = measured(made(name)) if in_blocks else as_one_part(lambda: made(name), monkeypatch)
    assert max(counts) > 1 or (not in_blocks and "checkpoint" in name)  # which is no part that could be divided
    assert [item.name for item in by_section] == [item.name for item in whole]
    assert [item.by_perturbation for item in by_section] == [item.by_perturbation for item in whole]
    for one, other in zip(by_section, whole, strict=True):
        if name not in SAMPLED or not other.by_perturbation:
            assert distance(one, other) <= TOLERANCES.get(name, RELATIVE), one.name


def test_a_border_that_only_an_earlier_section_gives_something_stays_as_it_is(monkeypatch):
    """The residual stream of a checkpointed GPT-2 is a border below sections that move nothing through it."""

    def adapted() -> dict[str, float]:
        torch.manual_seed(0)
        case = gpt2_with_labels()
        case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        gact = gact_dist.attach(case.model, config=Config(bits=4, min_numel=16, derive=False))
        with gact.step(case.loss_fn, case.batch):
            case.loss_fn(case.batch)
        [entry] = gact.history
        gact.detach()
        return {name: tensor["sensitivity"] for name, tensor in entry["tensors"].items()}

    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", None)
    whole = adapted()
    monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    assert adapted() == pytest.approx(whole, rel=RELATIVE)
