"""What is rounded comes back without the gaps that it had in a larger tensor; who may need the strides gets them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks.handles import Distributed, Stored, View

ROWS, WIDTH = 256, 64


def of_three(number: int = 1) -> Tensor:
    """One of three tensors that lie beside each other in a larger one."""
    return torch.randn(ROWS, 3 * WIDTH, generator=torch.Generator().manual_seed(0)).split(WIDTH, 1)[number]


def memory_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_a_rounded_tensor_takes_no_memory_for_gaps():
    tensor = of_three()
    stored = Stored("t", tensor, codec.pack(tensor, 4))
    found, with_gaps = stored.restore(), stored.restore_memory()
    assert torch.equal(found, with_gaps)
    assert (found.stride(), memory_bytes(found)) == ((WIDTH, 1), 4 * ROWS * WIDTH)
    assert with_gaps.stride() == tensor.stride()
    stored.keeps_gaps = True
    assert stored.restore().stride() == tensor.stride()


@pytest.mark.parametrize("payload", [codec.pack(of_three(), None), of_three()], ids=["copied", "itself"])
def test_what_is_exact_keeps_its_strides(payload):
    """Another kernel might serve other strides, and add in another order."""
    tensor = of_three()
    assert Stored("t", tensor, payload).restore().stride() == tensor.stride()


def test_heads_keep_their_order_in_memory():
    tensor = of_three().view(4, ROWS // 4, 2, WIDTH // 2).transpose(1, 2)
    found = Stored("t", tensor, codec.pack(tensor, 4)).restore()
    assert found.shape == tensor.shape
    assert memory_bytes(found) == 4 * ROWS * WIDTH
    assert found.transpose(1, 2).is_contiguous()


def test_a_view_finds_its_place_whoever_reads_before():
    tensor = of_three()
    for readers in (1, 2, 3):
        for first in (False, True):
            stored = Stored("t", tensor, codec.pack(tensor, 8))
            stored.readers = readers
            view = View(stored, tensor[:, 8:16], 8)
            expected = codec.unpack(stored.payload)[:, 8:16]
            handles = [view, stored, view] if first else [stored, view, stored]
            for handle in handles:
                found = handle.restore()
                assert torch.equal(found if handle is view else found[:, 8:16], expected)
                assert handle is not view or found.stride() == expected.stride()


def test_the_local_part_of_a_distributed_tensor_keeps_its_strides():
    """The strides that a DTensor names follow from those of its part."""
    tensor = of_three()
    stored = Stored("t", tensor, codec.pack(tensor, 4))
    assert Distributed(stored, lambda part: part).restore().stride() == tensor.stride()


class Halves(torch.autograd.Function):
    """Saves what it is given; backward notes the strides."""

    seen: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 0.5

    @staticmethod
    def backward(ctx, gradient):
        Halves.seen = ctx.saved_tensors[0].stride()
        return gradient * 0.5


def test_a_custom_function_gets_the_strides_that_it_saved():
    model = nn.Linear(WIDTH, 3 * WIDTH)
    gact = gact_dist.attach(model, config=Config.from_level("L1", checkpoint_inputs=False))
    for _ in range(3):
        with gact.step():
            loss = Halves.apply(model(torch.randn(ROWS, WIDTH)).split(WIDTH, 1)[1]).square().sum()
        loss.backward()
        assert Halves.seen == (3 * WIDTH, 1)


def gradients(level: str, model: nn.Module, batch: Tensor) -> list[Tensor]:
    gact = gact_dist.attach(model, level)
    for _ in range(3):
        with gact.step():
            q, k, v = model(batch).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            loss = F.scaled_dot_product_attention(q, k, v).square().sum()
        found = torch.autograd.grad(loss, list(model.parameters()))
    gact.detach()
    return found


def test_attention_over_parts_of_one_projection_is_as_close_as_over_copies():
    """The rounding is that of the same numbers, and the backward in a row of them is the same to rounding errors."""
    torch.manual_seed(0)
    model, batch = nn.Linear(WIDTH, 3 * WIDTH), torch.randn(4, ROWS, WIDTH)
    found, exact = gradients("L1", model, batch), gradients("exact", model, batch)
    error = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    # 4 bits in groups of 128: 1 to 2% of a tensor's variance, in products of three to five tensors.
    assert 0 < error < 0.1 * sum(float(b.square().sum()) for b in exact)
