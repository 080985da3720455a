"""What users of ActNN missed: savings on transformers, pretrained weights, layers that it had no conversion for."""

import copy
import math
from functools import partial

import pytest
import small_models
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import gact_dist


def bert(attention="sdpa"):
    """A small encoder of transformers, a batch and a loss function."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, attn_implementation=attention, **sizes))
    return model, (torch.randint(0, 100, (16, 64)), torch.randint(0, 2, (16,)))


def loss_of(model):
    return lambda batch: model(input_ids=batch[0], labels=batch[1]).loss


def stepped(gact, loss_fn, batch, steps=2):
    for _ in range(steps):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()


def test_a_transformer_saves_well_over_twice():
    model, batch = small_models.gpt(batch=16, length=64)
    gact = gact_dist.attach(model, "actnn-L3")
    stepped(gact, small_models.loss_of(model), batch)
    assert gact.report().ratio > 6.0


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_of_transformers_saves_ten_times_at_two_bits(attention):
    model, batch = bert(attention)
    gact = gact_dist.attach(model, "actnn-L3")
    stepped(gact, loss_of(model), batch)
    # float32 in 2 bits and 4 bytes for 256 elements: 15 times; a bit for dropout, statistics exact
    assert gact.report().ratio > 10.0


def test_pretrained_weights_keys_and_modules_stay_as_they_are():
    model, batch = small_models.cnn()
    loss_fn = small_models.loss_of(model)
    before, types = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    gact = gact_dist.attach(model, "actnn-L3")
    model.eval()  # batch statistics are the job's to change
    stepped(gact, loss_fn, batch, steps=1)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [type(module) for module in model.modules()] == types
    gact.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_weights_from_a_folder_survive_attach_steps_and_detach_whenever_they_are_loaded(tmp_path):
    pretrained, batch = bert()
    pretrained.save_pretrained(tmp_path)
    before = pretrained.state_dict()

    def assert_unchanged(model):
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[key], before[key]) for key in before)

    early = BertForSequenceClassification.from_pretrained(tmp_path)
    late = BertForSequenceClassification(pretrained.config)
    for model in (early, late):
        gact = gact_dist.attach(model, "actnn-L3")
        if model is late:
            model.load_state_dict(before)
        assert_unchanged(model)
        stepped(gact, loss_of(model), batch)
        assert gact.report().ratio > 2.0
        assert_unchanged(model)
        gact.detach()
        assert_unchanged(model)


class Attended(nn.MultiheadAttention):
    """[batch, length, channels] -> the same."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Gated(nn.GRU):
    """[batch, length, channels] -> the same."""

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(nn.GELU, id="GELU"),
        pytest.param(nn.Mish, id="Mish"),
        pytest.param(partial(nn.LayerNorm, 64), id="layer norm"),
        pytest.param(partial(Attended, 64, 4, batch_first=True), id="attention"),
        pytest.param(partial(Gated, 64, 64, batch_first=True), id="GRU"),
    ],
)
def test_a_layer_without_a_conversion_saves(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), make(), nn.Linear(64, 10))
    batch = torch.randn(64, 16, 64), torch.randint(0, 10, (64, 16))
    gact = gact_dist.attach(model, "actnn-L3")
    stepped(gact, small_models.loss_of(model), batch)
    rows = [row for row in gact.report().rows if row.name.partition(":")[0] == "1"]
    # float32 in two bits on average over the model: a layer that has three of them, and statistics, saves this much
    assert sum(4 * math.prod(row.shape) for row in rows) >= 8 * sum(row.bytes for row in rows) > 0
