"""Models of compiled blocks, measured and compared one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import small_models
import torch
from functorch.compile import make_boxed_func
from test_comparison import comparison, of_whole_gradients
from test_second_moment import Measured
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gact_dist.policies import Plan
from gact_dist.sensitivity import measure
from gact_dist.sensitivity.partition import blocks_as_run


def strict(module: GraphModule, traced: Sequence[Any]) -> Callable[..., Any]:
    """Runs a graph on what has the strides that it was made for, as inductor's code does."""

    def run(*inputs: Any) -> Any:
        for given, expected in zip(inputs, traced, strict=True):
            if isinstance(given, Tensor):
                assert given.stride() == expected.stride(), f"strides {given.stride()}, expected {expected.stride()}"
        return module(*inputs)

    return make_boxed_func(run)


STRICT = aot_autograd(fw_compiler=strict, bw_compiler=strict)


def in_place(model: nn.Module) -> None:
    """Each block's compile() was called."""
    for block in model.blocks:
        block.compile(backend=STRICT)


def wrapped(model: nn.Module) -> None:
    """Each block is what torch.compile returned."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=STRICT)


def inner(model: nn.Module) -> None:
    """Regions are parts of blocks."""
    for block in model.blocks:
        block.up.compile(backend=STRICT)
        block.norm1.compile(backend=STRICT)


class Checkpointed(nn.Module):
    """A compiled block in a checkpoint."""

    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


def checkpointed(model: nn.Module) -> None:
    """Each in a checkpoint."""
    in_place(model)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block)


def selective(model: nn.Module) -> None:
    """Each in a checkpoint that keeps the results of matrix products."""
    in_place(model)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, context_fn=contexts)


def within(model: nn.Module) -> None:
    """Each has such a checkpoint in its region, as in torchtitan: what that keeps is what the region saves."""
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])
    for number, block in enumerate(model.blocks):
        model.blocks[number] = Checkpointed(block, context_fn=contexts)
        model.blocks[number].compile(backend=STRICT)


HOW = {how.__name__: how for how in (in_place, wrapped, inner, checkpointed, selective, within)}


@pytest.fixture(scope="module", params=HOW.values(), ids=HOW)
def job(request) -> Measured:
    def build() -> tuple[nn.Module, Any]:
        torch._dynamo.reset()
        model, batch = small_models.gpt(dropout=0.1)
        request.param(model)
        return model, batch

    return Measured((build, ()), 4, compiled=True)


def test_a_comparison_is_that_of_whole_gradients_with_the_same_random_numbers(job, visited):
    compared = comparison(job)
    assert len(visited) >= 2 * 2  # every block once for each gradient
    error, square = of_whole_gradients(job, job.hooks.plan)
    assert compared.error == pytest.approx(error, rel=1e-3)
    assert compared.square == pytest.approx(square, rel=1e-5)


def test_with_nothing_rounded_the_two_gradients_are_the_same(job):
    compared = comparison(job, Plan())
    assert compared.error == 0.0 < compared.square


def test_both_moments_are_those_of_whole_gradients_with_the_same_random_numbers(job, exact_boundaries, visited):
    torch.manual_seed(1)
    moments = job.moments()
    assert visited
    expected = job.moments_of_whole_gradients()
    assert moments.noise == pytest.approx(expected.noise, rel=1e-3)
    assert moments.square == pytest.approx(expected.square, rel=1e-5)


def test_every_tensor_of_a_step_is_measured_under_its_name(job, visited):
    items = measure(job.hooks, job.model, job.loss, seed=0)
    assert visited
    with job.hooks.rehearsal() as footprint:
        job.loss().backward()
    rounded = {name for name in footprint.tensors if job.hooks.plan.bits_of(name)}
    assert {item.name for item in items} >= rounded > set()
    assert all(float(item.variance[0]) > 0.0 for item in items)


def test_a_block_starts_from_a_rounded_input_and_the_exact_results_that_its_checkpoint_keeps(visited):
    torch._dynamo.reset()
    model, batch = small_models.gpt(dropout=0.1)
    selective(model)
    job = Measured((lambda: (model, batch), ()), 4, compiled=True)
    items = measure(job.hooks, job.model, job.loss, seed=0)  # which sees that blocks take no discrete decisions
    found = comparison(job)
    assert visited
    assert {item.name for item in items} == {name for name in found.rounded if "LogSoftmax" not in name}
    assert sum("BlockInput" in name for name in found.rounded) == len(model.blocks)
    error, square = of_whole_gradients(job, job.hooks.plan)
    assert found.error == pytest.approx(error, rel=1e-3)
    assert found.square == pytest.approx(square, rel=1e-5)


def test_regions_under_selective_checkpoints_are_compiled_ever_after():
    model, batch = small_models.gpt()
    selective(model)
    job = Measured((lambda: (model, batch), ()), 4, compiled=True)
    torch._dynamo.reset()  # a comparison comes before the first step, and is the first to run a region
    comparison(job)
    measure(job.hooks, job.model, job.loss, seed=0)
    for block in model.blocks:
        output = block.block(torch.randn(8, 32, 64, requires_grad=True))
        assert output.grad_fn.name() == "CompiledFunctionBackward"


def test_a_region_with_blocks_inside_is_one():
    model, _ = small_models.gpt(layers=3)
    model.blocks = nn.Sequential(*model.blocks)
    assert set(model.blocks) < set(blocks_as_run(model))
    model.blocks.compile(backend=STRICT)
    assert model.blocks in blocks_as_run(model)
    assert not set(model.blocks) & set(blocks_as_run(model))
    model.compile(backend=STRICT)
    assert blocks_as_run(model) == []


def test_graphs_that_pack_what_they_save_are_not_cut():
    model, _ = small_models.gpt()
    in_place(model)
    assert blocks_as_run(model, inlined=True) == []
