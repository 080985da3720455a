"""Names of saved tensors do not depend on order, batch, wrapping or branches not taken."""

import pytest
import small_models
import torch
import torch.nn.functional as F
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks.naming import operator_name


def names(gact, forward):
    with gact.step():
        forward()
    return [row.name for row in gact.report().rows]


def attach(model):
    return gact_dist.attach(model, config=Config(policy="uniform", min_numel=0))


@pytest.mark.parametrize("kind", ["gpt", "cnn", "mlp"])
def test_names_are_unique_and_independent_of_step_and_batch_size(kind):
    model, (inputs, targets) = getattr(small_models, kind)()
    loss_fn = small_models.loss_of(model)
    gact = attach(model)
    whole = names(gact, lambda: loss_fn((inputs, targets)))
    again = names(gact, lambda: loss_fn((inputs, targets)))
    part = names(gact, lambda: loss_fn((inputs[:3], targets[:3])))
    assert len(set(whole)) == len(whole)
    assert whole == again == part


class Branching(nn.Module):
    """A branch inside one forward that runs the very operators that follow it."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, branch):
        h = torch.tanh(self.first(x))
        if branch:
            h = torch.tanh(self.extra(h))
            h = torch.sin(h * 3.0)
        h = torch.tanh(h * 2.0)
        return self.last(torch.sin(h * 4.0))


def test_a_branch_that_is_taken_or_not_shifts_no_other_name():
    model = Branching()
    gact = attach(model)
    x = torch.randn(32, 64)
    without = names(gact, lambda: model(x, False).sum())
    with_branch = names(gact, lambda: model(x, True).sum())
    assert set(without) < set(with_branch)
    assert names(gact, lambda: model(x, False).sum()) == without


def test_a_shared_module_called_twice_gives_two_names():
    shared = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    gact = attach(shared)
    x = torch.randn(32, 64)
    rows = names(gact, lambda: shared(shared(x)).sum())
    assert len(set(rows)) == len(rows) == 2  # the result of tanh twice


def test_names_do_not_depend_on_data_parallel_wrapping(ranks):
    plain, wrapped = ranks(_names_plain_and_wrapped)[0]
    assert plain == wrapped


def _names_plain_and_wrapped():
    model, batch = small_models.gpt()
    plain = names(attach(model), lambda: small_models.loss_of(model)(batch))
    parallel = nn.parallel.DistributedDataParallel(model)
    return plain, names(attach(parallel), lambda: small_models.loss_of(parallel)(batch))


def test_the_probe_uses_the_names_of_the_step():
    for kind in ("gpt", "cnn", "mlp"):
        model, batch = getattr(small_models, kind)()
        loss_fn = small_models.loss_of(model)
        gact = gact_dist.attach(model, config=Config(min_numel=0, bits=8))
        with gact.step(loss_fn, batch):
            loss_fn(batch)
        quantised = {row.name for row in gact.report().rows if row.codec == "quantised"}
        exact_by_plan = {name for name, bits in gact.plan.items() if bits is None}
        assert quantised | exact_by_plan == set(gact.plan)
        assert quantised


def test_names_say_where_and_what():
    model, batch = small_models.gpt()
    rows = names(attach(model), lambda: small_models.loss_of(model)(batch))
    assert "blocks.0.up:LayerNorm@4" in rows  # input of blocks.0.up, made by the layer norm before it
    assert "blocks.0:Addmm@8" in rows  # that of gelu, whether or not the result of a linear layer is a view
    assert ":LogSoftmax" in rows


def test_operator_names_do_not_depend_on_backend_or_version():
    assert operator_name("CudnnBatchNormBackward0") == operator_name("NativeBatchNormBackward0") == "BatchNorm"
    assert operator_name("ScaledDotProductFlashAttentionForCpuBackward0") == "ScaledDotProductAttention"
    assert operator_name("AddmmBackward0") == "Addmm"


def test_a_child_whose_forward_raised_does_not_lend_its_name_to_others():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.fragile, self.sound = Raising(), nn.Linear(64, 64)

        def forward(self, x):
            try:
                self.fragile(x)
            except ValueError:
                x = x + 1
            return F.gelu(self.sound(x))

    class Raising(nn.Module):
        def forward(self, x):
            raise ValueError

    model = Guarded()
    assert not [n for n in names(attach(model), lambda: model(torch.randn(8, 64)).sum()) if n.startswith("fragile")]


class Activations(nn.Module):
    """Two activation functions of torch.nn, one of them called by another module as well, and one of a user's own."""

    class Own(nn.GELU):
        pass

    class Caller(nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.activation = activation

        def forward(self, x):
            return self.activation(x) * 2.0

    def __init__(self):
        super().__init__()
        self.gelu, self.silu, self.own = nn.GELU(), nn.SiLU(), self.Own()
        self.caller = self.Caller(self.gelu)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(self.own(self.silu(self.caller(self.gelu(x * 2.0)))))


def test_what_a_layer_saves_has_its_path_though_it_has_no_hooks():
    model = Activations()
    gact = attach(model)
    found = names(gact, lambda: model(torch.randn(32, 64, requires_grad=True)).sum())
    assert [name.split("@")[0] for name in found[:4]] == ["gelu:Mul", "gelu:Gelu", "silu:Mul", "own:Silu"]
    assert found[4].startswith("norm:Gelu")
    assert names(gact, lambda: model(torch.randn(32, 64, requires_grad=True)).sum()) == found
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks]
    assert hooked == ["", "caller"]


class Layers(nn.Module):
    """Layers of torch.nn, and some of a user's that are not quite these."""

    class Shifted(nn.Linear):
        def forward(self, input):
            return super().forward(input + 1.0) * 2.0

    class Normalised(nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input * 2.0, weight / weight.norm(), bias)

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 64)
        self.plain, self.shifted = nn.Linear(64, 64), self.Shifted(64, 64)
        self.conv, self.normalised = nn.Conv2d(1, 4, 3), self.Normalised(4, 4, 3)
        self.batch_norm, self.dropout = nn.BatchNorm2d(4), nn.Dropout(0.5)

    def forward(self, words):
        x = self.shifted(self.plain(self.words(words)))
        return self.dropout(self.batch_norm(self.normalised(self.conv(x.unsqueeze(1)))))


def test_layers_have_no_hooks_and_what_they_save_has_their_path():
    model = Layers()
    gact = attach(model)
    words = torch.randint(32, (2, 16))
    found = names(gact, lambda: model(words).sum())
    paths = [name.split(":")[0] for name in found]
    assert paths == ["plain", "shifted", "conv", "normalised", *["batch_norm"] * 3, "dropout"]
    assert [name.split("@")[0] for name in found[:3]] == ["plain:Embedding", "shifted:Add", "conv:Mul"]
    assert [names(gact, lambda: model(words).sum()) for _ in range(3)] == [found] * 3  # settled, in the end
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks]
    assert hooked == ["", "shifted", "normalised"]


def test_an_activation_function_whose_forward_was_replaced_keeps_its_path():
    model = Activations()
    before = model.gelu.forward
    gact = attach(model)
    model.gelu.forward = lambda x: before(x + 1.0)
    found = names(gact, lambda: model(torch.randn(32, 64, requires_grad=True)).sum())
    assert found[0].split("@")[0] == "gelu:Add"
