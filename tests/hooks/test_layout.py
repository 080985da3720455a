"""Config.layout: the order in which a tensor's elements are grouped, in steps and where rounding is predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gact_dist
from gact_dist import Config, codec

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("layout", "columns"), [("columns", 64), ("memory", 1)])
@pytest.mark.parametrize("policy", ["uniform", "acgc"])
def test_steps_and_predictions_group_alike(layout, columns, policy):
    error = {"error": 0.1, "compressor": "error-bounded"} if policy == "acgc" else {}
    gact = gact_dist.attach(nn.Linear(64, 64), config=Config(policy=policy, layout=layout, **error))
    encoder = gact._schedule.hooks.encoder
    assert encoder.pack(X, 4, 1).columns == columns
    assert encoder.examples.columns_of(X) == encoder.columns_of(X, 1.0) == columns


def test_memory_order_is_what_a_tensor_without_rows_gets():
    packed = codec.pack(X, 4, 1, by_column=False)
    assert torch.equal(packed.payload, codec.pack(X.view(-1), 4, 1).payload)
    assert torch.equal(codec.unpack(packed), codec.unpack(codec.pack(X.view(-1), 4, 1)).view_as(X))
    by_column = codec.pack(X, 4, 1)  # the other form of the same shape
    assert by_column.columns == 64
    assert not torch.equal(codec.unpack(by_column), codec.unpack(packed))


def test_plain_tensors_say_their_layout():
    packed = codec.pack(X, 4, 1, by_column=False)
    back = codec.from_tensors(*codec.to_tensors(packed), X.dtype, X.shape, X.stride())
    assert torch.equal(back, codec.unpack(packed))


def test_another_layout_is_refused():
    with pytest.raises(ValueError, match="layout is 'rows', expected one of columns, memory"):
        Config(layout="rows")
