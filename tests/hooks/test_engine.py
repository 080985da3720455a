"""The pack and unpack hooks: what is stored, what comes back, and how long it lives."""

import gc

import pytest
import small_models
import torch
import torch.nn.functional as F
from torch import nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks.handles import Stored


def attached(model, policy="uniform", **settings):
    return gact_dist.attach(model, config=Config(policy=policy, **{"min_numel": 0, **settings}))


def rows_of(function, model=None, **settings):
    """Report rows of one forward of function() under a controller."""
    gact = attached(model if model is not None else nn.Identity(), **settings)
    with gact.step():
        result = function()
    rows = gact.report()
    gact.detach()
    return result, rows


def stored_alive():
    return sum(type(item) is Stored for item in gc.get_objects())


def hook_counts(model):
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


@pytest.mark.parametrize("kind", ["gpt", "cnn", "mlp"])
def test_exact_is_bitwise_the_untouched_job_and_keeps_the_same_bytes(kind):
    model, batch = getattr(small_models, kind)()
    loss_fn = small_models.loss_of(model)
    torch.manual_seed(3)
    untouched = gradients(model, loss_fn(batch))
    gact = attached(model, policy="exact")
    torch.manual_seed(3)
    with gact.step(loss_fn, batch):
        loss = loss_fn(batch)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, loss), untouched, strict=True))
    assert gact.report().retained_bytes == gact.report().exact_bytes > 0
    assert {row.codec for row in gact.report().rows} == {"exact"}


def test_exact_bytes_are_what_autograd_keeps():
    # Linear(64 -> 64) x 2 with a GELU between: autograd keeps the input of each linear and of the GELU, nothing else;
    # that of the first is the batch
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    _, report = rows_of(lambda: model(x).sum(), model, policy="exact")
    assert report.exact_bytes == 2 * 256 * 64 * 4


def test_retained_bytes_are_the_derived_ones():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    _, report = rows_of(lambda: model(x).sum(), model, bits=3)
    # 128 groups of 128 elements: 3 planes of 16 bytes, a scale and an offset of two bytes for each group
    assert report.retained_bytes == 2 * 128 * (3 * 16 + 2 + 2)
    assert report.ratio == pytest.approx(report.exact_bytes / report.retained_bytes)


def test_parameters_and_what_is_made_of_them_are_never_packed():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.gain = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 1))
            self.normalised = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))

        def forward(self, x):
            scaled = self.weight * torch.exp(self.gain)
            return self.normalised(F.linear(x, scaled.t()))

    model = Weighted()
    x = torch.randn(8, 64, requires_grad=False)
    _, report = rows_of(lambda: model(x).square().sum(), model, bits=2)
    # (64, 1): the norms that weight_norm saves are a statistic and stay exact
    assert {row.shape for row in report.rows if row.codec != "exact"} == {(8, 64)}


@pytest.mark.parametrize("frozen", [False, True])
def test_autocast_copies_of_weights_are_never_packed(frozen):
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(64, 64).requires_grad_(not frozen)
            self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(LoRA(), nn.GELU(), LoRA())
    x = torch.randn(24, 64)

    def forward():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    _, report = rows_of(forward, model, bits=4)
    assert not [row for row in report.rows if row.shape in ((64, 64), (64, 4), (4, 64))]
    assert [row for row in report.rows if row.codec == "quantised"]


def test_one_tensor_that_feeds_two_operators_is_stored_once():
    x = torch.randn(64, 64, requires_grad=True)

    def forward():
        h = x * 2.0
        return (h.exp() + h.sin() + F.gelu(h)).sum()

    _, report = rows_of(forward)
    # h once (sin and gelu), the result of exp once
    assert len(report.rows) == 2


def test_a_view_inside_a_stored_tensor_is_not_stored_again():
    x = torch.randn(64, 64, requires_grad=True)

    def forward():
        h = x.tanh()  # saves its result
        return (h.view(32, 128).sin() + h.t().reshape(32, 128).sin()).sum() + h[:32].cos().sum()

    loss, report = rows_of(forward, bits=8)
    # tanh's result serves sin of its view and cos of its first half; only the transposed copy is new memory
    assert len(report.rows) == 2
    expected = torch.autograd.grad(forward(), x)[0]
    (gradient,) = torch.autograd.grad(loss, x)
    # a step is 2/255; tanh's own derivative (slope 2) and three second derivatives of at most 1 see one step each, with
    # an incoming gradient of at most 3
    assert (gradient - expected).abs().max() < (2 * 3 + 3) * 2 / 255 * 1.01


def test_overlapping_views_store_their_base_where_that_is_smaller():
    x = torch.randn(40, 64, requires_grad=True)

    def forward():
        h = x * 1.0
        return sum((h[i : i + 30] * 2).sum() + h[i : i + 30].sin().sum() for i in range(5))

    gact = attached(nn.Identity(), bits=8)
    sizes = []
    for _ in range(3):
        with gact.step():
            loss = forward()
        sizes.append(gact.report().retained_bytes)
    # five windows of 30 rows store 150 rows, their base 40: from the second step on the base is stored
    one_row = 64 * (8 / 8) + 64 / 128 * 4
    assert sizes[1] == sizes[2] == pytest.approx(40 * one_row)
    expected = torch.autograd.grad(forward(), x)[0]
    (gradient,) = torch.autograd.grad(loss, x)
    # |cos'| <= 1 and a step of 8 bits is (max - min) / 255 < 8 / 255; five windows add up
    assert (gradient - expected).abs().max() < 5 * 8 / 255


def test_reuse_of_freed_memory_is_no_duplicate():
    gact = attached(nn.Identity(), bits=8)
    x = torch.randn(64, 64, requires_grad=True)
    losses = []
    with gact.step():
        for scale in range(1, 9):
            losses.append((x * scale).sin().sum())  # the product's memory may be handed out again each time
            gc.collect()
    for scale, loss in enumerate(losses, 1):
        (gradient,) = torch.autograd.grad(loss, x)
        step = scale * 10 / 255
        assert (gradient - scale * (x * scale).cos()).abs().max() <= scale * step


def test_modification_in_place_raises_as_without_hooks():
    x = torch.randn(64, 64, requires_grad=True)
    for policy in ("exact", "uniform"):
        gact = attached(nn.Identity(), policy=policy)
        with gact.step():
            h = x * 2
            loss = h.sin().sum()
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        gact.detach()


def test_modification_through_another_view_raises():
    x = torch.randn(64, 64, requires_grad=True)
    gact = attached(nn.Identity())
    with gact.step():
        h = x * 2
        loss = h.view(-1).sin().sum()
    with torch.no_grad():
        h[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_without_backward_frees_everything():
    model, batch = small_models.gpt()
    loss_fn = small_models.loss_of(model)
    gact = attached(model)
    with gact.step():
        loss = loss_fn(batch)
    before = stored_alive()
    del loss
    gc.collect()
    assert before > 20
    assert stored_alive() == 0


def test_payloads_are_freed_as_backward_goes_without_the_collector():
    model, batch = small_models.gpt()
    loss_fn = small_models.loss_of(model)
    gact = attached(model)
    gc.collect()
    gc.disable()
    try:
        with gact.step():
            loss = loss_fn(batch)
        loss.backward()
        assert stored_alive() == 0
    finally:
        gc.enable()


def test_retain_graph_and_two_backwards_give_the_same_gradient():
    model, batch = small_models.cnn()
    loss_fn = small_models.loss_of(model)
    gact = attached(model)
    with gact.step():
        loss = loss_fn(batch)
    first, second = gradients(model, loss), gradients(model, loss)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nested_gradient_penalty_runs_and_is_exact_with_exact_codecs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(32, 16, requires_grad=True)

    def penalty():
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    def penalty_gradient(loss):  # the last bias has none
        return torch.autograd.grad(loss, list(model.parameters())[:3])

    expected = penalty_gradient(penalty())
    for policy, bits in (("exact", None), ("uniform", 8)):
        gact = attached(model, policy=policy, bits=bits)
        with gact.step():
            loss = penalty()
        got = penalty_gradient(loss)
        if policy == "exact":
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert all((a - b).norm() < 0.05 * b.norm() for a, b in zip(got, expected, strict=True))
        gact.detach()


def test_no_grad_and_evaluation_inside_a_step_store_nothing():
    model, batch = small_models.cnn()
    gact = attached(model)
    with gact.step(), torch.no_grad():
        small_models.loss_of(model)(batch)
    assert gact.report().rows == ()
    assert gact.report().ratio == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_type_is_quantised(dtype):
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)

    def forward():
        h = x * 2
        return (h * h).abs().sum()

    loss, report = rows_of(forward, bits=8)
    assert any(row.codec == "quantised" and row.dtype == dtype for row in report.rows)
    expected = torch.autograd.grad(forward(), x)[0]
    (gradient,) = torch.autograd.grad(loss, x)
    assert (gradient - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 7, 2, 3), (0, 4), (2, 0, 3)])
def test_any_rank_and_zero_elements(shape):
    x = torch.randn(shape, requires_grad=True)
    loss, _ = rows_of(lambda: (x * 2).sin().sum(), bits=8)
    (gradient,) = torch.autograd.grad(loss, x)
    assert gradient.shape == shape
    assert torch.allclose(gradient, 2 * (2 * x).cos(), atol=0.2)


def unpacked(tensor, **settings):
    """A saved tensor as backward sees it."""
    seen = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return torch.zeros_like(seen[0])

    gact = attached(nn.Identity(), **settings)
    with gact.step():
        loss = Save.apply(tensor)
    loss.backward(retain_graph=True)
    gact.detach()
    return seen[0]


@pytest.mark.parametrize(("policy", "bits"), [("exact", None), ("uniform", 8)])
def test_strides_come_back_exactly(policy, bits):
    base = torch.randn(4, 6, 8, 10, requires_grad=True) * 1
    views = [
        base.contiguous(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2),
        base[:, ::2, 1:5],
        base[0, 0, :, 0].view(-1, 1).expand(8, 50),
        base.view(-1).unfold(0, 20, 3),
    ]
    for view in views:
        got = unpacked(view, policy=policy, bits=bits)
        assert got.stride() == view.stride()
        assert got.shape == view.shape
        assert (got - view).abs().max() <= (view.max() - view.min()) / 255 * 1.01


def test_boolean_masks_take_one_bit_and_are_exact():
    x = torch.randn(64, 128, requires_grad=True)
    mask = torch.rand(64, 128) > 0.5
    loss, report = rows_of(lambda: x.masked_fill(mask, 0.0).sum())
    row = next(row for row in report.rows if row.codec == "mask")
    assert (row.bits, row.bytes) == (1, 64 * 128 // 8)
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, (~mask).float())


def test_dropout_noise_takes_one_bit_and_is_exact():
    x = torch.randn(64, 128, requires_grad=True)

    def forward():
        torch.manual_seed(5)
        return (F.dropout(x * 1.0, 0.3) * 3).sum()

    loss, report = rows_of(forward)
    row = next(row for row in report.rows if row.codec == "binary")
    assert row.bytes == 64 * 128 // 8 + 4
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(forward(), x)[0])


def test_relu_keeps_its_own_mask_exactly():
    # 1 bit: values between 0 and the maximum are rounded to one of the two; relu's mask must not be made from those
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    loss, report = rows_of(lambda: (F.relu(x * 1.0) @ w).sum(), bits=1)
    assert {"mask", "quantised"} <= {row.codec for row in report.rows}
    (gradient,) = torch.autograd.grad(loss, x)
    exact = (x > 0).float()
    assert torch.equal((gradient != 0).float(), exact)


def test_relu_outside_the_hooks_is_no_mask():
    # its result is saved under our hooks first by the product: that must store values
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    hidden = F.relu(x)
    loss, report = rows_of(lambda: (hidden @ w).sum(), bits=8)
    assert "mask" not in {row.codec for row in report.rows}
    (gradient,) = torch.autograd.grad(loss, w)
    assert torch.allclose(gradient, hidden.sum(0)[:, None].expand(64, 64), rtol=0.02, atol=0.2)


def test_pooling_indices_are_narrowed_exactly():
    x = torch.randn(4, 8, 32, 32, requires_grad=True)

    def forward():
        return F.max_pool2d(x * 1.0, 2).square().sum()

    loss, report = rows_of(forward, bits=8)
    row = next(row for row in report.rows if row.codec == "narrow")
    assert row.bytes == 4 * 8 * 16 * 16 * 2  # int64 to int16: 32 x 32 positions
    (gradient,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(forward(), x)
    assert torch.equal(gradient != 0, expected != 0)


def test_statistics_and_what_is_next_to_the_loss_stay_exact():
    model, batch = small_models.gpt()
    _, report = rows_of(lambda: small_models.loss_of(model)(batch), model, bits=2)
    exact = {row.name for row in report.rows if row.codec == "exact"}
    assert any("LogSoftmax" in name for name in exact)
    # mean and rstd of the five layer norms, logsumexp of the two attentions
    statistics = [row for row in report.rows if row.codec == "exact" and row.shape in ((8, 32, 1), (8, 4, 32))]
    assert len(statistics) == 2 * 5 + 2


def test_attention_masks_stay_exact_and_are_stored_once():
    q = torch.randn(2, 4, 32, 16, requires_grad=True)
    mask = torch.zeros(2, 1, 32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), float("-inf"))

    def forward():
        h = q * 1.0
        for _ in range(3):
            h = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)
        return h.square().sum()

    loss, report = rows_of(forward, bits=8)
    rows = [row for row in report.rows if row.shape[-1] == 32 and row.codec == "exact"]
    assert sum(row.bytes for row in rows if row.shape == mask.shape) == mask.nbytes
    (gradient,) = torch.autograd.grad(loss, q)
    (expected,) = torch.autograd.grad(forward(), q)
    assert torch.isfinite(gradient).all()
    assert (gradient - expected).norm() < 0.05 * expected.norm()


def test_a_small_view_kept_exactly_does_not_keep_its_base_alive():
    x = torch.randn(64, 256, 64, requires_grad=True)

    def forward():
        return (x * 1.0)[:, 0].sin().sum()

    _, report = rows_of(forward, min_numel=10**6)
    assert report.retained_bytes == 64 * 64 * 4
    assert report.exact_bytes == x.nbytes


def test_tensors_below_min_numel_stay_exact():
    x = torch.randn(1023, requires_grad=True)
    _, report = rows_of(lambda: (x * 1.0).sin().sum(), min_numel=1024)
    assert [row.codec for row in report.rows] == ["exact"]


def test_rounding_differs_between_steps_and_tensors_but_not_between_runs():
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        gact = attached(nn.Identity(), bits=2, seed=7)
        gradients = []
        for _ in range(2):
            with gact.step():
                loss = (x * 1.0).sin().sum()
            gradients.append(torch.autograd.grad(loss, x)[0])
        return gradients

    first, second = run(), run()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_the_global_generators_are_not_moved():
    model, batch = small_models.gpt()
    gact = attached(model, policy="gact")
    state = torch.get_rng_state()
    loss_fn = small_models.loss_of(model)
    with gact.step(loss_fn, batch):
        loss_fn(batch)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exception_in_forward_leaves_the_next_step_whole():
    model, batch = small_models.gpt()
    loss_fn = small_models.loss_of(model)
    gact = attached(model, policy="exact")
    expected = gradients(model, loss_fn(batch))

    def fail(*_):
        raise KeyError("from the user's forward")

    handle = model.blocks[1].up.register_forward_hook(fail)
    with pytest.raises(KeyError), gact.step():
        loss_fn(batch)
    handle.remove()
    with gact.step():
        loss = loss_fn(batch)
    names = [row.name for row in gact.report().rows]
    assert not [name for name in names if "#" in name and "Input" not in name and "Addmm" not in name]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, loss), expected, strict=True))


def test_several_forwards_before_one_backward():
    model, batch = small_models.mlp()
    loss_fn = small_models.loss_of(model)
    gact = attached(model, policy="exact")
    expected = gradients(model, loss_fn(batch) + 2 * loss_fn(batch))
    with gact.step():
        first = loss_fn(batch)
    with gact.step():
        second = loss_fn(batch)
    got = gradients(model, first + 2 * second)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_detached_model_is_the_untouched_one():
    model, batch = small_models.gpt()
    before = {
        name: len(module._forward_pre_hooks) + len(module._forward_hooks) for name, module in model.named_modules()
    }
    gact = attached(model)
    with gact.step():
        loss = small_models.loss_of(model)(batch)
    gact.detach()
    after = {
        name: len(module._forward_pre_hooks) + len(module._forward_hooks) for name, module in model.named_modules()
    }
    assert before == after
    loss.backward()  # a graph that is alive still works
