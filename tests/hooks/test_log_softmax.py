"""A large log-softmax is sampled where its own backward alone reads it, and never there as a whole in that."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_storages import allocated_peaks
from simulated_device import Simulated, simulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gact_dist
from gact_dist import Config, codec
from gact_dist.hooks import SavedTensorHooks, handles
from gact_dist.policies import Plan
from gact_dist.sensitivity import compared

WORDS, WIDTH, BATCH, LENGTH = 4096, 32, 4, 16


class Speaker(nn.Module):
    """Words [batch, length] -> logits [batch * length, WORDS] of each head."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(heads))

    def forward(self, words: Tensor) -> Iterator[Tensor]:
        hidden = torch.tanh(self.body(self.embedding(words))).flatten(0, 1)
        return (head(hidden) for head in self.heads)  # one after the other


def job(heads: int = 1) -> tuple[Speaker, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    return Speaker(heads), (words[:, :-1], words[:, 1:].flatten())


def cross_entropy(model, batch, **settings):
    words, targets = batch
    return torch.stack([F.cross_entropy(logits, targets, **settings) for logits in model(words)]).sum()


def soft_targets(model, batch):
    (logits,) = model(batch[0])
    return F.cross_entropy(logits, torch.linspace(0, 2 / WORDS, WORDS).expand(len(logits), -1))


def distillation(model, batch):
    (logits,) = model(batch[0])
    return F.kl_div(logits.log_softmax(-1), torch.full((WORDS,), 1 / WORDS), reduction="batchmean")


def attached(model, mode="sampled", **settings):
    return gact_dist.attach(model, config=Config(**{"policy": "uniform", "log_softmax": mode, **settings}))


def rows_of(gact):
    return [row for row in gact.report().rows if re.search(r":LogSoftmax(?![A-Za-z])", row.name)]


def codecs(gact):
    return [row.codec for row in rows_of(gact)]


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def step(gact, loss_fn):
    with gact.step():
        return loss_fn()


LOSSES = {
    "cross_entropy": cross_entropy,
    "label smoothing": lambda model, batch: cross_entropy(model, batch, label_smoothing=0.1),
    "ignore_index": lambda model, batch: cross_entropy(
        model, (batch[0], batch[1].masked_fill(batch[1] % 3 == 0, -100)), ignore_index=-100, reduction="sum"
    ),
    "class weights": lambda model, batch: cross_entropy(
        model, batch, weight=torch.linspace(0.5, 2, WORDS), label_smoothing=0.1
    ),
    "nll_loss": lambda model, batch: sum(F.nll_loss(F.log_softmax(logits, 1), batch[1]) for logits in model(batch[0])),
    "gathered": lambda model, batch: (
        -sum(logits.log_softmax(-1).gather(1, batch[1][:, None]).mean() for logits in model(batch[0]))
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_nearly_the_exact_one_whatever_the_loss(loss):
    model, batch = job()
    loss_fn = LOSSES[loss]
    gact = attached(model, min_numel=2**17)  # nothing else is rounded
    for _ in range(3):  # of which the first is observed
        found = gradient(model, step(gact, lambda: loss_fn(model, batch)))
        assert codecs(gact) == ["sampled"]
        expected = gradient(model, loss_fn(model, batch))
        # 64 rows of nearly equal probabilities: p (m - p) is about (e - 1) p^2, and p^2 is 1/4096 of a target's 1
        assert 0 < (found - expected).square().sum() < 1e-3 * expected.square().sum()
    (row,) = rows_of(gact)
    assert row.bits == 1.25
    assert row.bytes < 1.8 * BATCH * LENGTH * WORDS / 8


def test_the_mean_of_many_gradients_is_the_exact_one():
    model, batch = job()
    gact = attached(model, min_numel=2**17)
    expected = gradient(model, cross_entropy(model, batch))
    draws = 40
    errors = [gradient(model, step(gact, lambda: cross_entropy(model, batch))) - expected for _ in range(draws)]
    one = torch.stack([error.square().sum() for error in errors]).mean()
    # without bias the mean has 1/40 of the variance; the square of a sum over so many parameters scatters by far less
    assert torch.stack(errors).mean(0).square().sum() < 1.3 * one / draws


def entropy(model, batch):
    (logits,) = model(batch[0])
    log_p = logits.log_softmax(-1)
    return F.nll_loss(log_p, batch[1]) + 0.1 * (log_p.exp() * log_p).sum(-1).mean()


def squared(model, batch):
    (logits,) = model(batch[0])
    return logits.log_softmax(-1).square().mean()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def custom(model, batch):
    (logits,) = model(batch[0])
    return Doubled.apply(logits.log_softmax(-1)).mean()


def penalty(model, batch):
    loss = cross_entropy(model, batch)
    (inner,) = torch.autograd.grad(loss, model.body.weight, create_graph=True)
    return loss + inner.square().sum()


def over_columns(model, batch):
    (logits,) = model(batch[0])
    return F.log_softmax(logits, 0).square().mean() + F.log_softmax(logits, 0)[0].sum()


def gradients(mode, loss_fn, steps=3):
    """Of some steps, and how the log-softmaxes of each were stored; all else is stored alike."""
    model, batch = job()
    gact = attached(model, mode, min_numel=2**17)
    found, how = [], []
    for number in range(steps):
        found.append(gradient(model, step(gact, lambda number=number: loss_fn(model, batch, number))))
        how.append(set(codecs(gact)))
    return found, how


@pytest.mark.parametrize("loss_fn", [entropy, squared, custom, penalty, over_columns, soft_targets, distillation])
def test_what_something_else_reads_is_exact(loss_fn):
    expected, _ = gradients("exact", lambda model, batch, _: loss_fn(model, batch))
    found, how = gradients("sampled", lambda model, batch, _: loss_fn(model, batch))
    first = 1 if loss_fn is penalty else 0  # its backward with create_graph shows who reads the result
    assert how[first:] == [{"exact"}] * (3 - first)
    assert all(map(torch.equal, found[first:], expected[first:]))


def test_another_reader_in_a_later_step_gets_the_logarithms():
    def loss_fn(model, batch, number):
        (logits,) = model(batch[0])
        log_p = logits.log_softmax(-1)
        loss = F.nll_loss(log_p, batch[1])
        if number > 1:
            loss = loss + 0.1 * (log_p.exp() * log_p).sum(-1).mean()
        return loss

    expected, _ = gradients("exact", loss_fn, 5)
    found, how = gradients("sampled", loss_fn, 5)
    assert how == [{"sampled"}, {"sampled"}, {"exact"}, {"exact"}, {"exact"}]
    assert all(map(torch.equal, found[2:], expected[2:]))


def test_a_second_backward_and_a_graph_that_is_dropped():
    model, batch = job()
    gact = attached(model)
    for _ in range(2):
        loss = step(gact, lambda: cross_entropy(model, batch))
        first = torch.autograd.grad(loss, model.body.weight, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, model.body.weight)[0], first)
        assert codecs(gact) == ["sampled"]
    loss = step(gact, lambda: cross_entropy(model, batch))
    del loss
    loss = step(gact, lambda: cross_entropy(model, batch))
    assert gradient(model, loss).isfinite().all()


def test_half_logits_of_autocast_and_of_a_half_model():
    for dtype, autocast in ((torch.bfloat16, True), (torch.bfloat16, False)):
        model, batch = job()
        model = model if autocast else model.to(dtype)
        gact = attached(model, min_numel=2**17)

        def loss_fn(model=model, batch=batch, autocast=autocast, dtype=dtype):
            with torch.autocast("cpu", dtype, enabled=autocast):
                return cross_entropy(model, batch)

        for _ in range(2):
            found = gradient(model, step(gact, loss_fn)).float()
            assert codecs(gact) == ["sampled"]
            expected = gradient(model, loss_fn()).float()
            # besides sampling, a bfloat16 gradient has a rounding of 2^-9 of its own
            assert (found - expected).square().sum() < 1e-3 * expected.square().sum()


@pytest.mark.parametrize("settings", [{"policy": "exact"}, {"bits": 8}, {"policy": "acgc", "error": 0.2}])
def test_levels_of_small_errors_keep_it_exactly(settings):
    model, batch = job()
    settings = {"min_numel": 2**17, **settings}
    gact = attached(model, **settings)
    found = gradient(model, step(gact, lambda: cross_entropy(model, batch)))
    assert codecs(gact) == ["exact"]
    assert torch.equal(found, gradient(model, cross_entropy(model, batch)))


def test_a_single_number_is_exact(caplog):
    model = nn.Linear(1, 1)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4, min_numel=0))
    with gact.step():
        loss = model(torch.ones(1)).squeeze().log_softmax(0) + model(torch.ones(1)).sum()
    loss.backward()
    assert model.weight.grad is not None
    assert not caplog.text


def test_few_classes_are_exact():
    x, targets = torch.randn(256, 512, requires_grad=True), torch.randint(512, (256,))
    gact = attached(nn.Identity())
    for _ in range(2):
        loss = step(gact, lambda: F.cross_entropy(x, targets))
        assert codecs(gact) == ["exact"]
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(F.cross_entropy(x, targets), x)[0])


# -- its backward -----------------------------------------------------------------------------------------------------


def of_large_logits(loss_fn, mode, backward=None):
    """The gradient at logits that are no leaf, and the peak of a step in units of them."""
    x, targets = large_logits()
    gact = attached(nn.Identity(), mode, min_numel=2**22)
    found = []

    def training_step():
        found.clear()
        loss = step(gact, lambda: loss_fn(x * 1.0, targets))
        found.append((backward or torch.autograd.grad)(loss, x)[0])

    training_step()
    (peak,) = allocated_peaks(training_step, 1)
    assert codecs(gact) == [mode]
    gact.detach()
    return found[0], peak / x.nbytes


def large_logits():
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(ROWS, WORDS, generator=generator)).requires_grad_()
    return x, torch.randint(WORDS, (ROWS,), generator=generator)


ROWS = 1024
BACKWARDS = {
    "mean": F.cross_entropy,
    "sum": lambda x, targets: F.cross_entropy(x, targets, reduction="sum"),
    "each": lambda x, targets: F.cross_entropy(x, targets, reduction="none") @ torch.linspace(1, 2, ROWS),
    "weights": lambda x, targets: F.cross_entropy(x, targets, weight=torch.linspace(0.5, 2, WORDS)),
    "ignored": lambda x, targets: F.cross_entropy(x, targets.masked_fill(targets % 3 == 0, -1), ignore_index=-1),
}


@pytest.mark.parametrize("loss", BACKWARDS)
def test_a_cross_entropy_has_one_large_gradient_in_its_backward(loss):
    """Bit for bit that of torch, where the log-softmax is exact."""
    found, peak = of_large_logits(BACKWARDS[loss], "exact")
    x, targets = large_logits()
    (expected,) = torch.autograd.grad(BACKWARDS[loss](x * 1.0, targets), x)
    assert torch.equal(found, expected)
    # logits and log-softmax; log-softmax and that gradient; that and its product with 1.0; and a few rows
    assert peak < 2.4
    near, peak = of_large_logits(BACKWARDS[loss], "sampled")
    assert 0 < (near - expected).square().sum() < 2e-2 * expected.square().sum()
    assert peak < 2.4


def seen_by_a_hook(x, targets):
    log_p = x.log_softmax(-1)
    log_p.register_hook(lambda gradient: gradient * 2)
    return F.nll_loss(log_p, targets)


def retained(x, targets):
    log_p = x.log_softmax(-1)
    log_p.retain_grad()
    return F.nll_loss(log_p, targets)


def in_three_dimensions(x, targets):
    return F.nll_loss(x.view(2, -1, WORDS).log_softmax(-1).flatten(0, 1), targets)


def read_twice(x, targets):
    log_p = x.log_softmax(-1)
    return F.nll_loss(log_p, targets) + F.nll_loss(log_p, targets.flip(0), reduction="sum")


def channels_last(x, targets):
    return F.cross_entropy(x.view(4, -1, WORDS).transpose(1, 2), targets.view(4, -1))


def of_pixels(x, targets, reduction="mean"):
    return F.cross_entropy(x.view(16, 256, 32, 32), targets[: 16 * 1024].view(16, 32, 32) % 256, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_cross_entropy_of_images_makes_one_at_a_time(reduction):
    """Of classes in the second dimension, and there as exact."""

    def loss_fn(x, targets):
        return of_pixels(x, targets.repeat(16), reduction).sum()

    found, peak = of_large_logits(loss_fn, "exact")
    x, targets = large_logits()
    assert torch.equal(found, torch.autograd.grad(loss_fn(x * 1.0, targets), x)[0])
    assert peak < 2.4


OTHERS = [seen_by_a_hook, retained, in_three_dimensions, read_twice, channels_last]


@pytest.mark.parametrize("loss_fn", OTHERS)
def test_what_else_meets_the_gradient_of_a_log_softmax_gets_all_of_it(loss_fn):
    found, _ = of_large_logits(loss_fn, "exact")
    x, targets = large_logits()
    assert torch.equal(found, torch.autograd.grad(loss_fn(x * 1.0, targets), x)[0])


def twice(loss, x):
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


def watched(loss, x):
    with torch.autograd.detect_anomaly(check_nan=True):
        return torch.autograd.grad(loss, x)


@pytest.mark.parametrize("backward", [twice, watched])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_other_backwards_through_it(backward):
    found, _ = of_large_logits(F.cross_entropy, "exact", backward)
    x, targets = large_logits()
    assert torch.equal(found, backward(F.cross_entropy(x * 1.0, targets), x)[0])


@pytest.mark.parametrize("mode", ["exact", "sampled"])
def test_the_peak_of_several_heads_falls_by_those_that_wait(mode):
    model, batch = job(heads=4)
    words, targets = batch[0].repeat(16, 1), batch[1].repeat(16)
    one = 4 * len(targets) * WORDS
    gact = attached(model, mode)

    def training_step():
        loss = step(gact, lambda: cross_entropy(model, (words, targets)))
        loss.backward()
        model.zero_grad()

    for _ in range(2):
        training_step()
    above = allocated_peaks(training_step, 1)[0] / one
    # four results beside the last one's logits, or later the gradient of these; or that one and its logits, and four at
    # 1.8 of 32 bits. Gradients of the heads' weights, hidden states and the temporaries of a chunk are less than half
    # of one
    expected = {"exact": 4 + 1, "sampled": 1 + 1 + 4 * 1.8 / 32}[mode]
    assert expected - 0.1 < above < expected + 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_report_names_what_the_loss_works_with(dtype):
    model, batch = job()
    words, targets = batch[0].repeat(16, 1), batch[1].repeat(16)
    gact = attached(model.to(dtype), "exact")

    def training_step():
        step(gact, lambda: sum(F.cross_entropy(logits.float(), targets) for logits in model(words))).backward()
        model.zero_grad()

    training_step()
    report = gact.report()
    assert report.log_softmax_bytes == 4 * len(targets) * WORDS
    assert f"two tensors of {report.log_softmax_bytes / 2**20:.2f} MiB" in str(report)
    (peak,) = allocated_peaks(training_step, 1)
    assert 2 * report.log_softmax_bytes <= peak < 2.75 * report.log_softmax_bytes  # half of one more in bfloat16
    step(gact, lambda: model.body(torch.randn(8, WIDTH, dtype=dtype)).sum())
    assert gact.report().log_softmax_bytes == 0
    assert "cross entropy" not in str(gact.report())


class InBlocks(nn.Module):
    """The loss of a model with blocks, between which its log-softmax lies."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def test_a_step_that_compares_has_one_gradient_of_all_words_at_a_time():
    torch.manual_seed(0)
    model, batch = InBlocks(), torch.randint(WORDS, (2, 1, ROWS)).unbind()  # one sequence, which has no parts
    gact = attached(model)

    def training_step():
        with gact.step(lambda batch: model(*batch), batch):
            loss = model(*batch)
        loss.backward()
        model.zero_grad()

    peaks = allocated_peaks(training_step, 6)
    assert codecs(gact) == ["sampled"]
    one = 4 * ROWS * WORDS
    # the log-softmax, the gradient of the logits of one pass, the logits of the head, which runs again, and some rows
    assert 3 * one < max(peaks) < 3.5 * one
    assert min(peaks) < 2.5 * one  # logits and log-softmax


def test_a_comparison_by_rows_is_that_of_the_whole(monkeypatch):
    torch.manual_seed(0)
    model, batch = InBlocks(), torch.randint(WORDS, (2, 1, ROWS)).unbind()
    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=4), 0)

    def found():
        return compared(hooks, model, lambda: model(*batch), Plan(default=4), draw=1)

    read = []
    unpack_part = codec.unpack_part
    monkeypatch.setattr(codec, "unpack_part", lambda *args: read.append(args) or unpack_part(*args))
    by_rows = found()
    assert len(read) > 4
    del read[:]
    monkeypatch.setattr(handles, "LEAST_NUMEL", 1 << 60)
    whole = found()
    assert not read
    assert (by_rows.error, by_rows.square) == (whole.error, whole.square)
    assert by_rows.error > 0


# -- around it --------------------------------------------------------------------------------------------------------


def test_a_verification_sees_it_and_can_store_it_exactly(monkeypatch, caplog):
    """A decoder that is wrong by far: the comparison finds the log-softmax, and later steps store it exactly."""
    model, batch = job()
    right = gact_dist.codec.sampled.unpack_rows

    def wrong(payload, rows, first, out):
        right(payload, rows, first, out)
        out += 12.0

    monkeypatch.setattr(gact_dist.codec.sampled, "unpack_rows", wrong)
    gact = attached(model, policy="gact")
    for _ in range(3):
        with gact.step(lambda batch: cross_entropy(model, batch), batch):
            loss = cross_entropy(model, batch)
        assert gradient(model, loss).isfinite().all()
    assert codecs(gact) == ["exact"]
    (line,) = [record.getMessage() for record in caplog.records if "stored exactly from now on" in record.getMessage()]
    assert line.startswith("stored exactly from now on: :LogSoftmax, because")


def test_offload_takes_the_payload(monkeypatch):
    def train(offload):
        model, batch = job(heads=2)
        gact = attached(
            model, offload={"enabled": offload, "min_bytes": 1024, "max_device_bytes": 1} if offload else {}
        )
        found = []
        for _ in range(3):
            loss = step(gact, lambda: cross_entropy(model, batch))
            found.append(gradient(model, loss))
        assert codecs(gact) == ["sampled", "sampled"]
        host_bytes = sum(row.host_bytes for row in rows_of(gact))
        gact.detach()
        return torch.stack(found), host_bytes

    expected, _ = train(False)
    simulate(monkeypatch, Simulated(1e9, 1e9, compute_s=1e-3))
    found, host_bytes = train(True)
    assert host_bytes > 0
    assert torch.equal(found, expected)


def test_a_llama_with_its_own_loss():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    words = torch.randint(WORDS, (4, 32))

    def loss_fn(words):
        return model(input_ids=words, labels=words).loss

    gact = attached(model, policy="gact")
    for _ in range(3):
        with gact.step(loss_fn, words):
            loss = loss_fn(words)
        found = gradient(model, loss)
    assert codecs(gact) == ["sampled"]
    expected = gradient(model, loss_fn(words))
    assert (found - expected).square().sum() < 0.2 * expected.square().sum()  # most of it by the 4 bits of all else
    assert gact.report().ratio > 6


def train_on_rank() -> tuple[list[str], Tensor, dict[str, object]]:
    """How the last step stored its log-softmaxes, the gradient that DDP reduced, and the plan."""
    model, _ = job(heads=2)
    torch.manual_seed(1 + dist.get_rank())
    words = torch.randint(WORDS, (BATCH, LENGTH + 1))
    batch = words[:, :-1], words[:, 1:].flatten()
    parallel = DistributedDataParallel(Summed(model))
    gact = attached(parallel, policy="gact")
    for _ in range(3):
        parallel.zero_grad()
        with gact.step(lambda batch: parallel(*batch), batch):
            loss = parallel(*batch)
        loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    result = codecs(gact), found, dict(gact.plan)
    gact.detach()
    return result


class Summed(nn.Module):
    def __init__(self, model: Speaker) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.model, (words, targets))


def test_two_ranks_share_a_plan_and_each_samples_its_own(ranks):
    (how, found, plan), (how_1, found_1, plan_1) = ranks(train_on_rank)
    assert how == how_1 == ["sampled", "sampled"]
    assert torch.equal(found, found_1)
    assert found.isfinite().all()
    assert plan == plan_1
    assert not any("LogSoftmax" in name for name in plan)
