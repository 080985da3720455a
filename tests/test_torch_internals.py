"""What the package reads of torch's internals is there, in the torch that the tests run with."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gact_dist import _torch_internals as internals


def resolved(dotted: str) -> object:
    """The object of a dotted name: the longest part of it that is a module, and attributes of that."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(dotted)


def test_the_torch_of_the_tests_is_the_one_that_was_checked():
    assert torch.__version__.startswith(internals.CHECKED_WITH + ".")


@pytest.mark.parametrize("name", internals.NEEDED)
def test_torch_has_what_is_read_of_it(name):
    if name.startswith("torch.distributed") and not dist.is_available():
        pytest.fail("this torch has no torch.distributed")
    resolved(name)


def test_a_name_that_is_gone_is_found():
    with pytest.raises(AttributeError):
        resolved("torch.utils.checkpoint._NoSuchFrame")


def test_what_nodes_saved_is_shown():
    handles = []

    def pack(tensor: torch.Tensor) -> object:
        handles.append(object())
        return handles[-1], tensor

    x = torch.randn(4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1]):
        y = x.exp()
        z = x * x.sin()
    assert internals.saved_handle(y.grad_fn, "result")[0] is handles[0]
    assert internals.saved_handle(z.grad_fn, "self")[0] in handles
    assert not internals.saves_own_result(torch.relu(x).grad_fn)
    assert not internals.in_backward()


def test_storages_are_told_apart_and_views_are_not():
    x = torch.randn(4)
    assert internals.storage_id(x) == internals.storage_id(x[1:]) != internals.storage_id(x.clone())


def test_compiled_modules_are_told():
    module = nn.Linear(2, 2)
    assert not internals.is_compiled(module)
    assert internals.is_compiled(torch.compile(module))
    module.compile()
    assert internals.is_compiled(module)
