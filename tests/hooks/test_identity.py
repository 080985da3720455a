"""What identifies a saved tensor: its memory, version, lazy bits and role; and which tensors are the model's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import gact_dist
from gact_dist import Config


def gradient_of(model, loss):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def stepped(model, loss_fn, **settings):
    """(gradient, report) of one step."""
    gact = gact_dist.attach(model, config=Config(**{"min_numel": 0, **settings}))
    with gact.step():
        loss = loss_fn()
    found = gradient_of(model, loss), gact.report()
    gact.detach()
    return found


# -- lazy bits --------------------------------------------------------------------------------------------------------

SPECTRA = {
    "power": lambda f: (f * f.conj()).real.square().sum(),
    "hermitian": lambda f: (f @ f.conj().mT).abs().sum(),
    "adjoint": lambda f: (f.mH @ f).abs().sum(),
    "part": lambda f: (f[:, :48] * f.conj()[:, :48]).real.square().sum(),
    "negated": lambda f: (f.conj().imag * f.imag).square().sum(),
    "transposed": lambda f: (f.conj().imag.T @ f.imag).abs().sum(),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_conjugated_and_negated_views_are_told_from_their_base(name):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64), torch.randn(32, 64)

    def loss_fn():
        return SPECTRA[name](torch.fft.fft(model(x)))

    untouched = gradient_of(model, loss_fn())
    exact, report = stepped(model, loss_fn, policy="exact")
    assert torch.equal(exact, untouched)
    assert report.retained_bytes == report.exact_bytes
    rounded, _ = stepped(model, loss_fn, policy="uniform", bits=8)
    # half a step of 1/255 of a group's range, some 5 of its standard deviations, at each of two or three operands
    assert (rounded - untouched).norm() / untouched.norm() < 3 * 5 / 255


def test_what_is_stored_of_a_spectrum_serves_its_conjugate_too():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    _, report = stepped(model, lambda: SPECTRA["power"](torch.fft.fft(model(x))), policy="uniform", bits=8)
    assert sum("FftR2C" in row.name for row in report.rows) == 1


# -- modification in place --------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def no_grad(change):
    with torch.no_grad():
        change()


def weight_of(model, x):
    return model(model(x)).sum(), lambda: no_grad(lambda: model.weight.mul_(1.5))


def buffer_of(model, x):
    model.register_buffer("basis", torch.randn(64, 64))
    return (model(x) @ model.basis).sum(), lambda: model.basis.mul_(2)


def leaf(model, x):
    x.requires_grad_()
    return (model(x) * x).sum(), lambda: no_grad(lambda: x.add_(1))


def leaf_through_data(model, x):
    x.requires_grad_()
    return (model(x) * x).sum(), lambda: x.data.add_(1)


def subclass(model, x):
    x = x.as_subclass(Subclass)
    return model(x).sum(), lambda: x.add_(1)


def sparse(model, x):
    matrix = torch.eye(64).to_sparse()
    return torch.sparse.mm(matrix, model(x)).sum(), lambda: matrix.mul_(2)


def integers(model, x):
    index = torch.randint(0, 64, (2000,))
    return model(x)[index].square().sum(), lambda: index.fill_(0)


def mask(model, x):
    chosen = torch.rand(64, 64) > 0.5
    return model(x).masked_fill(chosen, 0).sum(), lambda: chosen.fill_(True)


def penalty(model, x):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return gradient.square().sum(), lambda: no_grad(lambda: model.weight.mul_(1.5))


def optimizer(model, x):
    model(x).sum().backward()
    stepping = torch.optim.SGD(model.parameters(), 1.0)
    return model(model(x)).sum(), stepping.step


def product(model, x):
    twice = model.weight * 2
    return (model(x) @ twice).sum(), lambda: no_grad(lambda: twice.mul_(2))


CHANGES = [
    weight_of, buffer_of, leaf, leaf_through_data, subclass, sparse, integers, mask, penalty, optimizer, product,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_forward_and_backward_raises_as_without_hooks(change):
    outcomes = []
    for policy in ("off", "exact", "uniform"):
        torch.manual_seed(0)
        model, x = nn.Linear(64, 64), torch.randn(64, 64)
        gact = gact_dist.attach(model, config=Config(policy=policy))
        with gact.step():
            loss, modify = change(model, x)
        modify()
        try:
            loss.backward()
            outcomes.append("")
        except RuntimeError as error:
            outcomes.append(str(error).split(":")[0])
    assert len(set(outcomes)) == 1
    assert bool(outcomes[0]) == (change is not leaf_through_data)


def test_an_optimizer_that_steps_within_the_backward_goes_on():
    def trained(policy):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        gact = gact_dist.attach(model, config=Config(policy=policy))
        for _ in range(3):
            with gact.step():
                loss = model(x).square().mean()
            loss.backward()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, trained("exact"), trained("off")))


def test_data_that_is_swapped_after_the_forward_is_used():
    # as sharding does: it frees a parameter's memory, and gathers it elsewhere for the backward
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    gact = gact_dist.attach(model, config=Config(policy="exact"))
    untouched = gradient_of(model, model(x).sum())
    with gact.step():
        loss = model(x).sum()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert torch.equal(gradient_of(model, loss), untouched)


# -- made from parameters alone ---------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """A linear layer whose weight is made from parameters, and one before it that makes its input an activation."""

    def __init__(self, make, *sizes, frozen=()):
        super().__init__()
        self.before, self.make = nn.Linear(64, 64), make
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.1) for size in sizes)
        for number in frozen:
            self.parts[number].requires_grad_(False)

    def forward(self, x):
        return self.make(self.before(x), *self.parts)


def after_linear(module):
    return lambda: nn.Sequential(nn.Linear(64, 64), module(nn.Linear(64, 64)))


MADE = {
    "cat": lambda: Weighted(lambda h, a, b: F.linear(h, torch.cat([a, b])), (32, 64), (32, 64)),
    "stack": lambda: Weighted(lambda h, a, b: F.linear(h, torch.stack([a, b]).mean(0)), (64, 64), (64, 64)),
    "low rank": lambda: Weighted(lambda h, w, b, a: F.linear(h, w + b @ a), (64, 64), (64, 4), (4, 64)),
    "low rank, frozen": lambda: Weighted(
        lambda h, w, b, a: F.linear(h, w + 0.5 * (b @ a)), (64, 64), (64, 4), (4, 64), frozen=[0]
    ),
    "scaled": lambda: Weighted(lambda h, w: F.linear(h, w * 0.1), (64, 64)),
    "one more": lambda: Weighted(lambda h, w: h.repeat(1, 32) * (1 + w), (2048,)),
    "standardised": lambda: Weighted(
        lambda h, w: F.linear(h, (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)), (64, 64)
    ),
    "normalised": lambda: Weighted(lambda h, w: F.linear(h, F.normalize(w)), (64, 64)),
    "spectral_norm": after_linear(spectral_norm),
    "weight_norm": after_linear(weight_norm),
    "parametrized spectral_norm": after_linear(parametrizations.spectral_norm),
    "parametrized weight_norm": after_linear(parametrizations.weight_norm),
    "orthogonal": after_linear(parametrizations.orthogonal),
    "pruned": after_linear(lambda module: prune.l1_unstructured(module, "weight", 0.3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", MADE)
def test_what_is_made_from_parameters_alone_is_no_activation(name):
    torch.manual_seed(0)
    model, x = MADE[name](), torch.randn(128, 64)
    _, report = stepped(model, lambda: model(x).sum(), policy="uniform", bits=2, min_numel=100)
    assert {row.shape[0] for row in report.rows if row.codec != "exact"} == {128}
    assert all(torch.Size(row.shape).numel() <= 64 for row in report.rows if row.shape[:1] != (128,))


NOT_MADE = {
    "an input times a weight": lambda h, x, w: (x * w[0]).sigmoid() * h,
    "a matrix product of an input": lambda h, x, w: (x @ w).tanh() * h,
    "an input and a weight in one": lambda h, x, w: torch.cat([x, w]).exp()[:128] * h,
    "a sum with rows of its own": lambda h, x, w: (x + w[0]).exp() * h,
    "a lookup": lambda h, x, w: w[torch.arange(128) % 64].exp() * h,
}


@pytest.mark.parametrize("name", NOT_MADE)
def test_what_an_input_has_a_part_in_is_an_activation(name):
    torch.manual_seed(0)
    x = torch.randn(128, 64)
    model = Weighted(lambda h, w: NOT_MADE[name](h, x, w), (64, 64))
    _, report = stepped(model, lambda: model(x).sum(), policy="uniform", bits=4)
    made = {row.name for row in report.rows if row.codec == "quantised" and "Input" not in row.name}
    assert len(made) == 2  # h, and what it is multiplied with


# -- everything that is kept has a row --------------------------------------------------------------------------------


def held_bytes(model, forward):
    """Bytes of the storages that autograd holds for a plain forward, without those of parameters."""
    storages, own = {}, {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor):
        for part in [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]:
            storages[part.untyped_storage()._cdata] = part.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


KEPT = {
    "plain": lambda x: x,
    "leaf": lambda x: x.requires_grad_(),
    "subclass": lambda x: x.as_subclass(Subclass),
    "sparse": lambda x: x.relu().to_sparse(),
}


class Reads(nn.Module):
    """Has its input itself: what a loop hands over has no row."""

    def __init__(self, x):
        super().__init__()
        self.x = x
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def forward(self):
        return self.layers(torch.sparse.mm(self.x, self.layers[0].weight) if self.x.is_sparse else self.x)


@pytest.mark.parametrize("name", KEPT)
def test_everything_that_is_kept_has_a_row(name):
    torch.manual_seed(0)
    x = KEPT[name](torch.randn(64, 64))
    model = Reads(x)

    def loss_fn():
        return model().square().mean()

    untouched = gradient_of(model, loss_fn())
    gradient, report = stepped(model, loss_fn, policy="exact")
    assert torch.equal(gradient, untouched)
    assert report.exact_bytes == report.retained_bytes == held_bytes(model, loss_fn)
    _, report = stepped(model, loss_fn, policy="uniform", bits=4)
    assert report.exact_bytes == held_bytes(model, loss_fn)
    parts = [x._indices(), x._values()] if x.is_sparse else [x]
    rows = [row for row in report.rows if name.capitalize() in row.name]
    if name in ("subclass", "sparse"):  # no codec knows these kinds
        assert rows[0].bytes == sum(part.nbytes for part in parts)
    assert len(rows) >= (name != "plain")


def test_a_leaf_that_two_operators_save_has_one_row():
    x = torch.randn(64, 64, requires_grad=True)
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="uniform"))
    with gact.step():
        loss = (x.exp() * x).sum() + (x.view(-1) * x.cos().view(-1)).sum()
    loss.backward()
    rows = [row for row in gact.report().rows if "Leaf" in row.name]
    assert [row.codec for row in rows] == ["quantised"]


# -- roles ------------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """What dropout saves and what is multiplied with its result are saved on one line."""

    def __init__(self):
        super().__init__()
        self.layer, self.out, self.rate = nn.Linear(64, 64), nn.Linear(64, 8), 0.1

    def forward(self, x, gate):
        return self.out((F.dropout(self.layer(x), self.rate, self.training) * gate).tanh())


def turn_off_by_mode(model):
    model.eval()


def turn_off_by_rate(model):
    model.rate = 0.0


@pytest.mark.parametrize("turn_off", [turn_off_by_mode, turn_off_by_rate])
@pytest.mark.parametrize("level", ["L1", "L2"])
def test_the_role_of_dropout_noise_does_not_pass_to_a_soft_mask(level, turn_off):
    torch.manual_seed(0)
    model, batch, target = Gated(), (torch.randn(64, 64), torch.rand(64, 64)), torch.randint(8, (64,))

    def loss_fn(inputs):
        return F.cross_entropy(model(*inputs), target)

    gact = gact_dist.attach(model, level=level)
    for _ in range(3):
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
    assert "binary" in {row.codec for row in gact.report().rows}
    turn_off(model)
    untouched = gradient_of(model, loss_fn(batch))
    for _ in range(2):
        with gact.step():
            loss = loss_fn(batch)
        error = (gradient_of(model, loss) - untouched).norm() / untouched.norm()
        assert "binary" not in {row.codec for row in gact.report().rows}
        assert error < 0.25  # 4 bits: a fifteenth of a group's range at each of three tensors; one bit gave 1.1


# -- many views -------------------------------------------------------------------------------------------------------


def test_thousands_of_views_of_one_storage_take_a_time_in_proportion(monkeypatch):
    compared = 0

    def counting(*args):
        nonlocal compared
        for part in near(*args):
            compared += 1
            yield part

    near = gact_dist.hooks.aliases._near
    monkeypatch.setattr(gact_dist.hooks.aliases, "_near", counting)
    weight = nn.Parameter(torch.ones(16))
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="exact", min_numel=0))
    for count in (500, 2000):
        compared = 0
        with gact.step():
            whole = torch.sin(torch.randn(count, 16) * weight)
            total = sum(torch.sin(part) for part in whole)
        assert compared <= 8 * count
    total.sum().backward()


@pytest.mark.parametrize("stride", [1, 7, 16])
def test_views_among_many_are_found_where_they_were_stored(stride):
    weight = nn.Parameter(torch.ones(4000))
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="exact", min_numel=0))
    starts = range(0, 3900, stride)
    with gact.step():
        whole = torch.sin(torch.randn(4000) * weight)
        first = [torch.sin(whole[start : start + 16]) for start in starts]
        rows = len(gact.report().rows)
        again = [torch.cos(whole[start : start + 16]) for start in starts]
        inner = [torch.cos(whole[start + 3 : start + 13]) for start in starts]
    assert len(gact.report().rows) == rows
    total = sum(part.sum() for part in (*first, *again, *inner))
    (gradient,) = torch.autograd.grad(total, whole)
    values = whole.detach().clone().requires_grad_()
    expected = sum(
        torch.sin(values[s : s + 16]).sum()
        + torch.cos(values[s : s + 16]).sum()
        + torch.cos(values[s + 3 : s + 13]).sum()
        for s in starts
    )
    assert torch.allclose(gradient, torch.autograd.grad(expected, values)[0], atol=1e-5)


EXPANDED = {
    "expanded": (lambda h: h.expand(32, 64)[:, ::2], 60),
    "sliding windows": (lambda h: h.unfold(0, 8, 2)[:, ::2], 60),
    "as long as it has elements": (lambda h: h[:4].as_strided((2, 2), (0, 3)), 4),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_what_lies_between_the_elements_of_an_expanded_tensor_is_not_lost(name):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64))
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="uniform", bits=8, min_numel=0))
    with_gaps, stop = EXPANDED[name]

    def loss_fn():
        h = torch.sin(weight)
        return with_gaps(h).square().mean() + h[:stop].pow(3).mean()

    (untouched,) = torch.autograd.grad(loss_fn(), weight)
    for _ in range(2):
        with gact.step():
            loss = loss_fn()
        (found,) = torch.autograd.grad(loss, weight)
        assert (found - untouched).norm() < 0.02 * untouched.norm()
    gact.detach()
