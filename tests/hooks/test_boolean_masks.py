"""What fused attention keeps of a boolean mask is made again from that: bit for bit, and the mask is stored once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import gact_dist
from gact_dist import Config
from gact_dist.hooks.attention_calls import AttentionCall, running
from gact_dist.hooks.boolean_masks import BooleanMasks, as_added

SAMPLES, HEADS, TOKENS, HEAD_WIDTH = 4, 4, 32, 8
WIDTH = HEADS * HEAD_WIDTH
ORIGINAL = F.scaled_dot_product_attention
PADDED = torch.arange(TOKENS) < torch.tensor([[32], [20], [7], [25]])
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
MASKS = {
    "of the batch": PADDED[:, None, None] & CAUSAL,
    "causal": CAUSAL,
    "padding alone": PADDED[:, None, None],
    "of every head": (PADDED[:, None, None] & CAUSAL).repeat(1, HEADS, 1, 1),
    "expanded": PADDED[:, None, None].expand(SAMPLES, HEADS, TOKENS, TOKENS),
}


class Layer(nn.Module):
    """Attention between projections. options: of the attention."""

    def __init__(self, **options):
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), options

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask, **self.options).transpose(1, 2).flatten(2))


class Job:
    """Two layers that share a mask; some steps with the same random numbers each time."""

    def __init__(self, mask: Tensor | None, tokens: int = TOKENS, config: Config | None = None, **options):
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(**options) for _ in range(2))
        self.x, self.mask = torch.randn(SAMPLES, tokens, WIDTH), mask
        self.gact = gact_dist.attach(self.layers, config=config or Config(policy="uniform", bits=4, min_numel=16))

    def gradients(self, steps: int = 3, masks: list[Tensor] | None = None) -> list[Tensor]:
        found = []
        for number in range(steps):
            self.layers.zero_grad()
            with self.gact.step(self.loss, self.x):
                if masks is not None:
                    self.mask = masks[number]
                loss = self.loss(self.x)
            loss.backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in self.layers.parameters()]))
        self.gact.detach()
        return found

    def loss(self, x: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask[: len(x)] if self.mask.dim() == 4 else self.mask
        for layer in self.layers:
            x = layer(x, mask)
        return x.square().mean()


def made_masks(job: Job) -> list:
    return [row for row in job.gact.report().rows if row.dtype == torch.float32 and row.codec == "derived"]


def booleans(job: Job) -> list:
    return [row for row in job.gact.report().rows if row.dtype == torch.bool]


@pytest.mark.parametrize("policy", ["uniform", "gact"])
@pytest.mark.parametrize("name", MASKS)
def test_the_gradient_is_bitwise_that_of_masks_that_are_stored(name, policy, monkeypatch):
    config = Config(policy=policy, bits=4, min_numel=16)
    made = Job(MASKS[name], config=config)
    found = made.gradients()
    report = made.gact.report()
    monkeypatch.setattr(BooleanMasks, "behind", lambda *_: None)
    stored = Job(MASKS[name], config=config)
    for one, other in zip(found, stored.gradients(), strict=True):
        assert torch.equal(one, other)
    assert [row.codec for row in booleans(made)] == ["mask"]  # for both layers
    names = {row.name for row in report.rows if row.dtype != torch.bool}
    assert names == {row.name for row in stored.gact.report().rows}
    assert report.exact_bytes == stored.gact.report().exact_bytes
    assert report.retained_bytes < stored.gact.report().retained_bytes


def test_all_masks_are_made_of_one():
    job = Job(MASKS["of the batch"])
    job.gradients()
    assert [(row.shape, row.bytes) for row in made_masks(job)] == 2 * [((SAMPLES, 1, TOKENS, TOKENS), 0)]
    (row,) = booleans(job)
    assert row.bytes < SAMPLES * TOKENS * TOKENS // 7


def test_a_mask_may_be_another_in_every_step(monkeypatch):
    masks = [MASKS["of the batch"], MASKS["of the batch"].flip(0), MASKS["padding alone"].expand(-1, 1, TOKENS, -1)]
    job = Job(masks[0])
    found = job.gradients(masks=masks)
    assert len(made_masks(job)) == 2
    monkeypatch.setattr(BooleanMasks, "behind", lambda *_: None)
    for one, other in zip(found, Job(masks[0]).gradients(masks=masks), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "job",
    [
        lambda: Job(as_added(MASKS["of the batch"], torch.float32)),
        lambda: Job(None, is_causal=True),
        lambda: Job(MASKS["of the batch"], dropout_p=0.1),
        lambda: Job(torch.ones(HEAD_WIDTH, HEAD_WIDTH, dtype=torch.bool).tril(), tokens=HEAD_WIDTH),
        lambda: Job(MASKS["of the batch"], config=Config(policy="exact")),
    ],
    ids=["a mask of numbers", "no mask", "dropout", "heads as wide as the sequence", "exact"],
)
def test_where_no_mask_is_made_again(job):
    made = job()
    made.gradients()
    assert made_masks(made) == booleans(made) == []


def test_what_is_not_of_the_mask_is_not_taken_for_it():
    masks, mask = BooleanMasks(), MASKS["of the batch"]
    q = torch.randn(SAMPLES, HEADS, TOKENS, HEAD_WIDTH)
    assert not masks.is_running
    with running(AttentionCall((q, q, q), {"attn_mask": mask})):
        assert masks.is_running
        _check_what_is_not_of_the_mask(masks, mask, q)
    assert masks.behind(as_added(mask, torch.float32), "mask", False) is None


def _check_what_is_not_of_the_mask(masks: BooleanMasks, mask: Tensor, q: Tensor) -> None:
    added = as_added(mask, torch.float32)
    assert masks.behind(added, "mask", False) is mask
    assert masks.behind(added.expand(-1, HEADS, -1, -1), "mask", False) is mask
    assert masks.behind(added.nan_to_num(neginf=-1e9), "mask", False) is None
    assert masks.behind(as_added(~mask, torch.float32), "mask", False) is None
    assert masks.behind(q, "mask", False) is None
    assert masks.behind(added[..., :-1], "mask", False) is None
    assert masks.behind(added * torch.ones(1, requires_grad=True), "mask", False) is None


def test_where_a_comparison_would_wait_for_the_device_an_observed_step_has_made_it():
    with FakeTensorMode():
        mask = torch.ones(SAMPLES, 1, TOKENS, TOKENS, dtype=torch.bool, device="cuda")
        masks, added = BooleanMasks(), torch.zeros(mask.shape, device="cuda")
    with running(AttentionCall((), {"attn_mask": mask})):
        assert masks.behind(added, "mask", False) is None
        assert masks.behind(added, "mask", True) is mask  # which compares nothing that has no values
        assert masks.behind(added, "mask", False) is mask
        assert masks.behind(added, "another", False) is None


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), {}),
        ((1,), {"attn_mask": torch.tensor(True)}),
        ((torch.ones(2), torch.ones(2)), {"attn_mask": torch.ones(2, 2, dtype=torch.bool)}),
        (3 * (torch.ones(1, 1, 4, 8),), {"attn_mask": torch.ones(3, 3, dtype=torch.bool)}),
        (3 * (torch.ones(1, 1, 4, 8),), {"mask": None}),
    ],
)
def test_a_wrong_call_of_attention_has_the_error_of_torch(args, options):
    with pytest.raises((TypeError, RuntimeError)) as expected:
        F.scaled_dot_product_attention(*args, **options)
    gact = gact_dist.attach(nn.Linear(2, 2), config=Config(policy="uniform", bits=4))
    with gact.step(), pytest.raises(type(expected.value)) as found:
        F.scaled_dot_product_attention(*args, **options)
    gact.detach()
    assert str(found.value) == str(expected.value)


def test_attention_is_itself_again_after_a_step():
    job = Job(MASKS["causal"])
    job.gradients(1)
    assert F.scaled_dot_product_attention is ORIGINAL
    job = Job(MASKS["causal"])
    with pytest.raises(ValueError, match="of the user's"), job.gact.step():
        raise ValueError("of the user's")
    assert F.scaled_dot_product_attention is ORIGINAL
