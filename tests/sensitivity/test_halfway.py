"""A measurement in two calls, between which the job trains: the numbers are those of one call."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from block_models import CASES, Case, Layer, Stack, made, made_opaque, on_rows
from create_graph_jobs import penalty
from modes import ROWS, Cell, adamw, batch_of, loss_of
from small_models import TinyGPT
from test_blocks import RELATIVE, _with_seed, distance, measured, seed, started
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import Paused, kept, one_pass, probe, sections
from gact_dist.sensitivity.blocks import BlockForward
from gact_dist.sensitivity.halfway import ResumeError
from gact_dist.sensitivity.one_pass import Sensitivity, measure


@pytest.fixture
def exact_borders(monkeypatch):
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", None)


def paused(case: Case, probes: int = 2, **options: Any) -> Any:
    """The first half, and the hooks of the model."""
    hooks = started(case, Config(min_numel=0, bits=8, derive=False))
    seed()
    forward = partial(case.loss_fn, case.batch)
    return measure(hooks, case.model, forward, seed=3, probes=probes, **{"shares": 2, **options}), hooks


def in_two_halves(case: Case, **options: Any) -> list[Sensitivity]:
    """With other random numbers in between."""
    return in_shares(case, 2, **options)


def in_shares(case: Case, shares: int, **options: Any) -> list[Sensitivity]:
    """As in_two_halves()."""
    found, hooks = paused(case, shares=shares, **options)
    for _ in range(shares - 1):
        assert isinstance(found, Paused)
        torch.manual_seed(99)
        found = found.resume(partial(case.loss_fn, kept(case.batch)))
    hooks.close()
    assert isinstance(found, list)
    return found


def assert_same(halves: list[Sensitivity], whole: list[Sensitivity]) -> None:
    assert [item.name for item in halves] == [item.name for item in whole]
    for one, other in zip(halves, whole, strict=True):
        assert distance(one, other) <= RELATIVE, one.name
        assert replace(one, variance=other.variance, examples=None) == replace(other, examples=None)


@pytest.mark.parametrize("in_sections", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_halves_give_the_numbers_of_one_call(name, in_sections, exact_borders, monkeypatch):
    if in_sections:
        monkeypatch.setattr(sections, "LEAST_BYTES", 1)
    assert_same(in_two_halves(made(name)), measured(made(name)))


@pytest.mark.parametrize("name", ["gpt with dropout", "unet", "called several times", "tied", "encoder and decoder"])
def test_three_shares_give_the_numbers_of_one_call(name, exact_borders):
    assert_same(in_shares(made(name), 3), measured(made(name)))


def test_there_are_no_more_shares_than_blocks(exact_borders):
    """Two blocks: the second share comes to the end, and what would be the third has nothing left."""
    case = on_rows(Stack(Layer(), Layer()))
    found, hooks = paused(case, shares=9)
    shares = 1
    while isinstance(found, Paused):
        found, shares = found.resume(partial(case.loss_fn, case.batch)), shares + 1
    hooks.close()
    assert 2 <= shares < 9
    assert_same(found, measured(case))


@pytest.mark.parametrize("name", ["gpt", "llama", "unet"])
def test_what_is_derived_is_so_in_both_halves(name, exact_borders):
    case = made(name)
    hooks = started(case, Config(min_numel=0, bits=4, derive=True))
    forward = partial(case.loss_fn, case.batch)
    seed()
    first = measure(hooks, case.model, forward, seed=3, probes=2, shares=2)
    halves = first.resume(forward)
    seed()
    at_once = measure(hooks, case.model, forward, seed=3, probes=2)
    hooks.close()
    assert_same(halves, at_once)


@pytest.mark.parametrize(
    "name", ["unet", "called several times", "structures", "encoder and decoder", "expanded", "tied"]
)
def test_they_may_meet_at_any_block(name, exact_borders, monkeypatch):
    whole, stops = measured(made(name)), []
    monkeypatch.setattr(one_pass, "stop_of", lambda forward, *_: stops.append(len(forward.visits)) or stop)
    stop = 1
    while not stops or stop <= stops[-1]:
        assert_same(in_two_halves(made(name)), whole)
        stop += 1
    assert stop > 4


class Sliced(Stack):
    """What one block saves is read in halves by two others."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(size, size), nn.Sigmoid()) for size in (16, 8, 8, 16)))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[3](torch.cat([self.blocks[1](x[:, :8]), self.blocks[2](x[:, 8:])], 1))


def sliced() -> Case:
    torch.manual_seed(0)
    return on_rows(Sliced())


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_tensor_may_be_read_in_parts_by_blocks_of_both_halves(stop, exact_borders, monkeypatch):
    monkeypatch.setattr(one_pass, "stop_of", lambda *_, **__: stop)
    assert_same(in_two_halves(sliced()), measured(sliced()))


@pytest.mark.parametrize("name", ["Function", "LSTM", "EmbeddingBag"])
def test_a_block_without_second_derivative_may_be_in_either_half(name, exact_borders, monkeypatch):
    whole = measured(made_opaque(name))
    for stop in range(1, 6):
        monkeypatch.setattr(one_pass, "stop_of", lambda *_, stop=stop, **__: stop)
        halves = in_two_halves(made_opaque(name))
        assert [item.by_perturbation for item in halves] == [item.by_perturbation for item in whole]
        assert_same(halves, whole)


@pytest.mark.parametrize("name", ["gpt with dropout", "unet", "encoder and decoder", "called several times"])
def test_what_is_carried_in_8_bits_adds_little(name, exact_borders, monkeypatch):
    """As at the borders of blocks, see test_boundaries_of_8_bits_add_little."""
    exact = measured(made(name))
    monkeypatch.setattr(one_pass, "BOUNDARY_BITS", 8)
    rounded = []
    for draw in range(8):
        monkeypatch.setattr(one_pass, "BlockForward", partial(_with_seed, BlockForward, 1000 * draw))
        rounded.append(in_two_halves(made(name)))
        assert [item.name for item in rounded[-1]] == [item.name for item in exact]
    for one, *others, other in zip(*rounded, exact, strict=True):
        mean = replace(one, variance=sum((item.variance for item in others), one.variance) / 8)
        if not other.by_perturbation:
            assert distance(mean, other) <= 0.1, one.name


def test_the_first_half_ends_where_about_a_third_of_the_second_walk_is_done():
    """Which has as many bytes to visit in all as were saved; the embedding of tokens, which has none, is no block."""
    forwards: list[BlockForward] = []
    stop_of = one_pass.stop_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "stop_of", lambda forward, *how: forwards.append(forward) or stop_of(forward, *how))
        paused(on_rows(Stack(*(Layer() for _ in range(20)))))
    (forward,) = forwards
    stop = stop_of(forward, False, 0.5)
    done = sum(record.nbytes for visit in forward.visits[:stop] for record in visit.own)
    assert done / sum(record.nbytes for record in forward.found) == pytest.approx(0.35, abs=0.03)
    assert stop < stop_of(forward, False, 2 / 3, stop) < len(forward.visits)
    assert stop_of(forward, False, 2 / 3, len(forward.visits)) is None
    assert stop_of(forward, True, 0.5) == round(
        0.35 * (len(forward.visits) + 1)
    )  # what is left is as much as one block


def test_in_between_nothing_is_held_but_what_was_found_at_the_borders(monkeypatch):
    forwards: list[weakref.ref] = []

    class Noted(BlockForward):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            forwards.append(weakref.ref(self))

    monkeypatch.setattr(one_pass, "BlockForward", Noted)
    case = made("gpt")
    gc.collect()
    before = {storage._cdata: StorageWeakRef(storage) for storage in storages()}  # whose memory no other has meanwhile
    first, hooks = paused(case)
    gc.collect()
    assert [forward() for forward in forwards] == [None]
    left = sum(storage.nbytes() for storage in storages() if storage._cdata not in before)
    rows, width, layers = case.batch[0].numel(), 16, 3
    # of 8 bits each, with what their groups take: the gradients at the inputs and outputs of the blocks from the third
    # on, and of embedding, norm and head; two tangents; the sums and the tensor that two blocks share
    assert 0 < left < 1.5 * rows * (width * 2 * (layers + 3) + 37) + 2 * rows * width * 4
    first.resume(partial(case.loss_fn, case.batch))
    hooks.close()


def storages() -> list[Any]:
    found = {}
    for candidate in gc.get_objects():
        if type(candidate) is torch.Tensor and candidate.layout is torch.strided:
            storage = candidate.untyped_storage()
            found[storage.data_ptr()] = storage
    return list(found.values())


def test_parameters_may_be_a_step_newer_in_the_second_half(exact_borders):
    """The steps are so small that 1% is ten times as much as they change."""
    case, whole = made("gpt"), measured(made("gpt"))
    first, _ = paused(case)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)
    found = first.resume(partial(case.loss_fn, case.batch))
    differences = [distance(one, other) for one, other in zip(found, whole, strict=True)]
    assert 0.0 < max(differences) < 0.01


class Turning(Stack):
    """One block is skipped in a second forward."""

    skips = False

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[int(self.skips) :]:
            x = block(x)
        return x


def test_other_blocks_or_shapes_in_the_second_forward_are_noticed():
    case = on_rows(Turning(*(Layer() for _ in range(3))))
    first, _ = paused(case)
    with pytest.raises(ResumeError, match="tensors of other shapes"):
        first.resume(partial(case.loss_fn, tuple(part[:20] for part in case.batch)))
    case.model.skips = True
    with pytest.raises(ResumeError, match="other blocks"):
        first.resume(partial(case.loss_fn, case.batch))


class Routing(Layer):
    """Some rows, as the parameters decide, go through another layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (self.up(x).sum(-1) > 0).nonzero().squeeze(-1)
        return super().forward(x).index_add(0, rows, torch.sigmoid(self.inner[0](x[rows])))


def test_inside_of_blocks_shapes_may_be_others():
    case = on_rows(Stack(*(Routing() for _ in range(3))))
    first, hooks = paused(case)
    with torch.no_grad():
        for block in case.model.blocks:
            block.up.bias.add_(0.3)
    forward = partial(case.loss_fn, case.batch)
    seed()
    newer = measure(hooks, case.model, forward, seed=3, probes=2)
    found = first.resume(forward)
    assert {item.name for item in found} == {item.name for item in newer}
    assert all(bool(item.variance.isfinite().all()) for item in found)


def test_what_cannot_pause_is_measured_at_once():
    alone = Case(nn.Linear(16, 5), None, None)
    single = Case(alone.model, lambda rows: alone.model(rows).square().mean(), torch.randn(8, 16))
    assert isinstance(paused(single)[0], list)
    assert isinstance(paused(made("gpt"), estimator="perturbation")[0], list)
    critic, batch, loss_fn = penalty()
    assert isinstance(paused(Case(critic, loss_fn, batch))[0], list)


def test_a_kept_batch_has_memory_of_its_own_which_tensors_share_as_before():
    tokens = torch.arange(24.0).view(4, 6)
    batch = {"x": tokens[1:3, :-1], "y": (tokens[1:3, 1:], tokens.t()[2:4, 1]), "mask": torch.ones(2).to_sparse()}
    copy = kept(batch)
    same, shifted, column = copy["x"], *copy["y"]
    for made_of, own in ((batch["x"], same), (batch["y"][0], shifted), (batch["y"][1], column)):
        assert torch.equal(made_of, own)
        assert made_of.stride() == own.stride()
    tokens.zero_()
    assert float(same[0, 0]) == 6.0
    same.fill_(7.0)
    assert float(shifted[0, 0]) == float(column[0]) == 7.0
    assert copy["mask"].is_sparse
    held = same.untyped_storage().nbytes()
    assert held == 4 * (24 - 6 - 6)  # no more than from the first element to the last


def test_an_observation_keeps_no_more_than_its_examples():
    inputs = ((torch.randn(8, 3),), {})
    whole = probe.Observation(inputs, 8)
    whole._gradients = {0: torch.randn(8, 2)}
    assert whole.kept().inputs[0][0] is whole.inputs[0][0]
    part = whole.part(2, 3)
    own = part.kept()
    assert torch.equal(own.inputs[0][0], part.inputs[0][0])
    assert torch.equal(own._gradients[0], part._gradients[0])
    assert own.inputs[0][0].untyped_storage().nbytes() == 12
    assert own._gradients[0].untyped_storage().nbytes() == 8


# -- ranks ---------------------------------------------------------------------------------------------------------


def both_ways(row: str, examples: tuple[int, ...]) -> tuple[list[Sensitivity], list[Sensitivity], bool]:
    """In one call and in two, on this rank's first examples."""
    deeper = type("Deeper", (ROWS[row],), {"build": lambda _: TinyGPT(37, width=16, layers=4, dropout=0.1)})
    job = deeper(Cell(row, "none", "fp32", "eager"), adamw)
    batch = tuple(part[: examples[job.data_rank()]] for part in batch_of(0, job.data_rank()))
    case = Case(job.model, lambda batch: loss_of(job.model(batch[0]), batch[1]), batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "BOUNDARY_BITS", None)
        hooks = SavedTensorHooks(job.model, Config(min_numel=0, bits=8, derive=False), 0)
        torch.manual_seed(5)
        first = measure(hooks, job.model, partial(case.loss_fn, batch), seed=3, probes=2, shares=2)
        torch.manual_seed(99)
        halves = first.resume(partial(case.loss_fn, kept(batch)))
        torch.manual_seed(5)
        whole = measure(hooks, job.model, partial(case.loss_fn, batch), seed=3, probes=2)
        hooks.close()
    job.close()
    return halves, whole, isinstance(first, Paused)


@pytest.mark.parametrize(
    ("row", "examples"),
    [("DDP", (1, 4)), ("FSDP1", (1, 4)), ("FSDP2", (1, 4)), ("ZeRO-3", (1, 4)), ("TP", (4,)), ("FSDP2 + TP", (1, 4))],
)
def test_two_halves_on_ranks_that_share_parameters(ranks, row, examples):
    for halves, whole, has_paused in ranks(both_ways, row, examples, world_size=ROWS[row].world_size):
        assert has_paused
        assert_same(halves, whole)
        assert any(float(item.variance.sum()) > 0 for item in whole)
