"""What backward makes again from other tensors, on two ranks: plans agree, and sharding may take parameters away."""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import wrapped
from small_models import gpt, loss_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import gact_dist
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks

STEPS = 4


def norms_apart(model: nn.Module, blocks: wrapped.Blocks) -> nn.Module:
    """Each norm is a unit of its own: its parameters are gone when the next operator saves its result."""
    for norm in [module for module in model.modules() if isinstance(module, nn.LayerNorm)]:
        fully_shard(norm)
    return wrapped.fsdp2(model, blocks)


def layers_apart(model: nn.Module, blocks: wrapped.Blocks) -> nn.Module:
    """Each layer is a unit: what enters it has passed a node that registers what comes after its backward."""
    for layer in [module for module in model.modules() if isinstance(module, (nn.LayerNorm, nn.Linear))]:
        fully_shard(layer)
    return wrapped.fsdp2(model, blocks)


WRAPPERS = {**wrapped.WRAPPERS, "FSDP2, norms apart": norms_apart, "FSDP2, layers apart": layers_apart}


def trained(wrapper: str, derive: bool | None) -> tuple[dict, list[str], list[float], float]:
    """(plan, operators that are derived, losses, average bits) of a rank. derive: None for the untouched job."""
    torch.manual_seed(0)
    model, batch = gpt()
    torch.manual_seed(dist.get_rank())
    batch = tuple(tensor[torch.randperm(len(tensor))] for tensor in batch)
    model = WRAPPERS[wrapper](model, model.blocks)
    config = Config(policy="off") if derive is None else Config(bits=6, derive=derive, min_numel=16)
    gact = gact_dist.attach(model, config=config)
    losses = wrapped.losses_of(gact, model, loss_of(model), batch, STEPS)
    rows = [] if derive is None else gact.report().rows
    derived = [row.name.rpartition(":")[2].partition("@")[0] for row in rows if row.codec == "derived"]
    adaptation = gact.adaptation
    return gact.plan, sorted(set(derived)), losses, 0.0 if adaptation is None else adaptation.average_bits


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tensors_are_derived_on_all_ranks_alike(ranks, wrapper):
    untouched = ranks(trained, wrapper, None)
    stored = ranks(trained, wrapper, False)
    derived = ranks(trained, wrapper, True)
    assert derived[0][0] == derived[1][0]
    # Attention's logsumexp has no graph, and so the name of an input.
    assert derived[0][1] == derived[1][1] == ["Gelu", "Input", "LayerNorm", "ScaledDotProductAttention"]
    assert len(derived[0][0]) < len(stored[0][0])
    assert stored[0][3] <= 6 < derived[0][3] <= 7  # what is not stored leaves bits to what is
    for rank in range(2):
        first, last = untouched[rank][2][0], untouched[rank][2][-1]
        assert derived[rank][2] == pytest.approx(untouched[rank][2], abs=0.05 * abs(first - last))


def rehearsals_where_rank_1_keeps_learning() -> int:
    """How often a rank ran the forward that shows what is derived."""
    torch.manual_seed(0)
    model, batch = gpt()
    model, loss_fn = wrapped.fsdp2(model, model.blocks), loss_of(model)
    gact = gact_dist.attach(model, config=Config(bits=6, derive=True, min_numel=16))
    learnt, original = count(), SavedTensorHooks.state_dict
    rehearsal = SavedTensorHooks.rehearsal
    seen = []

    def state_dict(hooks: SavedTensorHooks) -> dict:
        return original(hooks) | ({"store_base": [next(learnt)]} if dist.get_rank() == 1 else {})

    def counted(*args, **options):
        seen.append(args)
        return rehearsal(*args, **options)

    with patch.object(SavedTensorHooks, "state_dict", state_dict), patch.object(SavedTensorHooks, "rehearsal", counted):
        gact.calibrate(loss_fn, batch)
    return len(seen)


def test_ranks_that_share_parameters_rehearse_equally_often(ranks):
    assert ranks(rehearsals_where_rank_1_keeps_learning) == [3, 3]
