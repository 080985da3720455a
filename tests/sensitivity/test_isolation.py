"""A measurement leaves no trace: what the model's forward changes, and what the user's hooks see."""

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import gact_dist
from gact_dist import Config
from gact_dist.sensitivity.attributes import Attributes
from gact_dist.sensitivity.in_place import InPlace


def measured(model, x, how="calibrate", **settings):
    """A measurement of each kind, on a model that returns its loss; no step of the job runs."""
    gact = gact_dist.attach(model, config=Config(**{"policy": "gact", "min_numel": 0, **settings}))
    gact.calibrate(lambda batch: model(batch), x)
    assert gact.plan
    gact.detach()


SETTINGS = [
    {},
    {"estimator": "perturbation"},
    {"bits": None, "retained_bytes": 40_000},
    {"policy": "acgc", "error": 0.25},
]
ANY_SETTINGS = pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "one-pass")


class Table(OrderedDict):
    """Makes what it is asked for, as transformers' table of activations does."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class Meter:
    def __init__(self):
        self.count, self.history = 0, []


CALLS = 0
SEEN = []


class Stateful(nn.Module):
    """Keeps all kinds of things between its forwards."""

    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)
        self.hidden = [copy.deepcopy(self.layer)]
        self.momentum = nn.Parameter(torch.zeros(64), requires_grad=False)
        self.calls, self.running, self.cache = 0, torch.zeros(64), {}
        self.seen, self.recent, self.lengths = [], deque(maxlen=3), set()
        self.counts, self.table, self.ordered = Counter(), defaultdict(list), OrderedDict(a=1, b=2)
        self.meter, self.settings = Meter(), SimpleNamespace(scale=1.0)
        self.activations = Table(relu=nn.ReLU, dropout=nn.Module.forward)  # of which one cannot be made
        self.generator, self.random = torch.Generator().manual_seed(3), random.Random(3)
        self.numpy, self.older = np.random.default_rng(3), np.random.RandomState(3)
        self.first = True

    def forward(self, x):
        global CALLS
        CALLS += 1
        SEEN.append(len(x))
        with torch.no_grad():
            for own, other in zip(self.layer.parameters(), self.teacher.parameters(), strict=True):
                other.data = other.data * 0.9 + own.data * 0.1
            for own, other in zip(self.layer.parameters(), self.hidden[0].parameters(), strict=True):
                other.mul_(0.9).add_(own, alpha=0.1)
            torch._foreach_add_([self.momentum], 1.0)
            self.out.weight.copy_(F.normalize(self.out.weight))
            self.running.lerp_(x.mean(0), 0.1)
        h = self.layer(x) + torch.randn(64, generator=self.generator) * self.random.random()
        h = h * float(self.numpy.random()) + float(self.older.rand())
        self.calls += 1
        self.cache[self.calls] = h.detach()
        self.seen.append(self.calls)
        self.recent.append(self.calls)
        self.lengths.add(self.calls)
        self.counts["forward"] += 1
        self.table["forward"].append(self.calls)
        self.ordered.move_to_end("a")
        self.ordered["c"] = self.calls
        self.meter.count += 1
        self.meter.history.append(self.calls)
        self.settings.scale *= 2
        self.latest, self.activations[self.calls] = h.detach(), nn.GELU
        if self.first:
            self.register_buffer("made", torch.ones(3))
            self.first = False
        return self.out(self.activations["relu"](h) + self.teacher(x)).square().mean()


def plain(value):
    """What a model holds, in values that compare."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().numpy().tobytes(), value._version, value.data_ptr()
    if isinstance(value, torch.Generator):
        return plain(value.get_state())[0]
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    if isinstance(value, nn.Module):
        return {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in dict.items(value)]
    if isinstance(value, (list, deque, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (Meter, SimpleNamespace)):
        return plain(vars(value))
    return value


@ANY_SETTINGS
def test_what_a_model_keeps_between_forwards_is_as_before(settings):
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(32, 64)
    with torch.no_grad():
        model.layer.weight.add_(0.1)
    before, globals_before = plain(model), (CALLS, list(SEEN))
    measured(model, x, **settings)
    after = plain(model)
    assert {name for name in before | after if before.get(name) != after.get(name)} == set()
    assert globals_before == (CALLS, SEEN)


def test_the_next_step_is_that_of_a_job_without_measurements():
    losses = []
    for level in ("exact", "L2"):
        torch.manual_seed(0)
        model, x = Stateful(), torch.randn(32, 64)
        gact = gact_dist.attach(model, level=level)
        for _ in range(3):
            with gact.step(model, x):
                loss = model(x)
            losses.append(float(loss))
    assert losses[:3] == losses[3:]


def test_dynamic_rotary_frequencies_are_those_of_the_job():
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 64, (2, 128))

    def trained(level):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
        gact = gact_dist.attach(model, level=level)

        def loss_fn(batch):
            return model(input_ids=batch, labels=batch).loss

        with gact.step(loss_fn, tokens):
            loss = loss_fn(tokens)
        return float(loss), model.model.rotary_emb.inv_freq.clone()

    (loss, frequencies), (untouched, expected) = trained("L2"), trained("exact")
    assert loss == untouched
    assert torch.equal(frequencies, expected)


def test_a_key_encoder_that_follows_in_the_forward_moves_once_a_step():
    class MoCo(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(64, 512), dim=0))

        def forward(self, x):
            query = F.normalize(self.query(x), dim=1)
            with torch.no_grad():
                for own, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    other.data = other.data * 0.9 + own.data * 0.1
                key = F.normalize(self.key(x), dim=1)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1)
            self.queue[:, : len(x)] = key.T
            return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    torch.manual_seed(0)
    model, x = MoCo(), torch.randn(32, 64)
    with torch.no_grad():
        model.query[0].weight.add_(0.1)
    before = plain(model)
    measured(model, x)
    assert plain(model) == before


def test_a_change_that_cannot_be_undone_is_told(caplog):
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.count = nn.Linear(64, 64), nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            with torch._C.DisableTorchFunction():  # as a kernel of an extension would do it
                self.count.add_(1)
            return self.layer(x).square().mean()

    measured(Opaque(), torch.randn(32, 64))
    assert "changed tensors of shapes [(3,)] in place in a way that cannot be undone" in caplog.text


# -- hooks ------------------------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.first, self.second, self.called = nn.Linear(64, 64), nn.Linear(64, 64), called

    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda _: self.called("a tensor's"))
        return self.second(h.tanh()).square().mean()


class Calls:
    """Of hooks; one that has slots is not looked into, so that it shows every call."""

    __slots__ = ("names",)

    def __init__(self):
        self.names = []

    def __call__(self, name):
        self.names.append(name)


def hook(model, calls):
    weight = model.first.weight
    weight.register_hook(lambda _: calls("a parameter's"))
    weight.register_post_accumulate_grad_hook(lambda _: calls("after accumulation"))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda _: calls("of several parameters"))
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: calls("of the accumulating node"))
    node.register_prehook(lambda *_: calls("before the accumulating node"))
    model.first.register_full_backward_hook(lambda *_: calls("full backward"))
    model.second.register_full_backward_pre_hook(lambda *_: calls("full backward pre"))
    return node


@ANY_SETTINGS
def test_backward_hooks_of_the_user_are_not_called(settings):
    calls = Calls()
    model, x = Hooked(calls), torch.randn(32, 64)
    _node = hook(model, calls)
    everywhere = nn.modules.module.register_module_full_backward_hook(lambda *_: calls("of all modules"))
    try:
        measured(model, x, **settings)
        assert calls.names == []
        model(x).backward()
    finally:
        everywhere.remove()
    assert set(calls.names) == {
        "a tensor's", "a parameter's", "after accumulation", "of several parameters", "of the accumulating node",
        "before the accumulating node", "full backward", "full backward pre", "of all modules",
    }  # fmt: skip


def test_what_a_forward_hook_collects_is_what_the_job_gave_it():
    collected, latest = [], None

    def collect(_, __, output):
        nonlocal latest
        latest = output
        collected.append(output)

    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(32, 64)
    model[0].register_forward_hook(collect)
    gact = gact_dist.attach(model, level="L2")
    gact.calibrate(lambda batch: model(batch).square().mean(), x)
    assert collected == []
    assert latest is None


def test_gradients_that_a_hook_of_a_module_changes_are_measured_under_the_names_of_a_step():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
    model[0].register_full_backward_hook(lambda *_: None)
    gact = gact_dist.attach(model, config=Config(policy="gact", min_numel=0))
    with gact.step(lambda batch: model(batch).square().mean(), x):
        loss = model(x).square().mean()
    loss.backward()
    assert {row.name for row in gact.report().rows if row.codec == "quantised"} == set(gact.plan)


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


# -- with little copying ----------------------------------------------------------------------------------------------


def test_nothing_that_a_forward_only_reads_is_copied(monkeypatch):
    copied = []
    clone = torch.Tensor.clone

    def counted(tensor, *args, **kwargs):
        copied.append(tensor.shape)
        return clone(tensor, *args, **kwargs)

    model = nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64))
    model.large = torch.randn(1000)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", counted)
        measured(WithLoss(model), torch.randn(8, 64))
    assert not {torch.Size([100, 64]), torch.Size([64, 100]), torch.Size([1000])} & set(copied)


def test_containers_that_hold_themselves_end():
    module = nn.Linear(2, 2)
    module.loop = [module]
    module.loop.append(module.loop)
    module.table = {"loop": module.loop}
    attributes = Attributes([module])
    module.loop.append(1)
    attributes.restore()
    assert len(module.loop) == 2


def test_a_parameter_whose_elements_share_memory_is_set_back():
    weight = torch.nn.Parameter(torch.arange(4.0).expand(3, 4))
    writes = InPlace([weight])
    with torch.no_grad(), writes:
        weight[0].add_(1)
    writes.restore()
    assert torch.equal(weight, torch.arange(4.0).expand(3, 4))


# -- the graph of the job ---------------------------------------------------------------------------------------------


def narrow(width, out):
    return nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, out))


class Hyper(nn.Module):
    """Its blocks multiply by a tensor that another network has computed before."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
        self.scale = None

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * self.scale.exp()
        return x


def with_a_batch_that_was_computed(follow):
    """A generator's step, as of a GAN: (both models, the one to attach to, its loss function and batch)."""
    generator, critic, noise = narrow(64, 64), narrow(64, 8), torch.randn(32, 64)
    return (generator, critic), critic, lambda: (lambda batch: critic(batch).square().mean(), generator(noise))


def with_a_closure_that_was_computed(follow):
    first, second, x = nn.Linear(64, 64), narrow(64, 8), torch.randn(32, 64)

    def made():
        shift = first(x).tanh().mean(0)
        return lambda batch: second(batch + (0 if follow else shift)).square().mean(), x + shift if follow else x

    return (first, second), second, made


def with_an_attribute_that_was_computed(follow):
    first, second, x = nn.Linear(64, 64), Hyper(), torch.randn(32, 64)

    def made():
        second.scale = first(x).tanh().mean(0)
        return lambda batch: second(batch).square().mean(), x

    return (first, second), second, made


def with_parameters_that_were_computed(follow):
    """MAML: the second forward is with parameters that are a step further."""
    model, x = narrow(64, 8), torch.randn(32, 64)

    def loss_fn(batch):
        parameters = dict(model.named_parameters())
        for _ in range(2):
            loss = functional_call(model, parameters, (batch,)).square().mean()
            gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            moved = [value - 0.1 * step for value, step in zip(parameters.values(), gradients, strict=True)]
            parameters = dict(zip(parameters, moved, strict=True))
        return functional_call(model, parameters, (batch,)).square().mean()

    return (model,), model, lambda: (loss_fn, x)


@pytest.mark.parametrize("follow", [False, True], ids=["step", "follow"])
@pytest.mark.parametrize(
    "settings", [*SETTINGS, {"policy": "uniform"}], ids=lambda settings: "-".join(settings) or "one-pass"
)
@pytest.mark.parametrize(
    "job",
    [
        with_a_batch_that_was_computed,
        with_a_closure_that_was_computed,
        with_an_attribute_that_was_computed,
        with_parameters_that_were_computed,
    ],
    ids=lambda job: job.__name__.removeprefix("with_"),
)
def test_a_graph_that_the_job_made_before_is_still_there_for_its_backward(job, settings, follow):
    torch.manual_seed(0)
    models, attached_to, made = job(follow)
    parameters = [parameter for model in models for parameter in model.parameters()]
    settings = {"policy": "gact", "min_numel": 0, "adapt_interval": 2, "adapt_tolerance": 0, **settings}
    # AC-GC goes by its own draws: what is seen of one forward of several says little of the step's gradient
    most = 4.0 if settings["policy"] == "acgc" else 0.2
    loss_fn, batch = made()
    expected = torch.autograd.grad(loss_fn(batch), parameters)
    gact = gact_dist.attach(attached_to, config=Config(**settings))
    if follow:
        gact.follow()
    for _ in range(5):
        loss_fn, batch = made()
        with nullcontext() if follow else gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        found = torch.autograd.grad(loss, parameters)
        error = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
        assert error < most * sum(float(part.square().sum()) for part in expected)
    assert bool(gact.plan) == (settings["policy"] != "uniform")
    gact.detach()


# -- warnings ---------------------------------------------------------------------------------------------------------


class Warns(nn.Module):
    """Warns in every forward, itself and through torch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.layers[1].register_full_backward_hook(lambda *_: None)

    def forward(self, x):
        warnings.warn("a warning of the model's own", stacklevel=1)
        return F.l1_loss(self.layers(x), torch.zeros(64))


@ANY_SETTINGS
def test_a_measurement_shows_no_warning_of_the_model_and_counts_none_as_shown(settings):
    model, x = Warns(), torch.randn(32, 64)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: seen.append(str(message).split()[0])
        measured(model, x, **settings)
        assert seen == []
        for _ in range(3):
            model(x)
            measured(model, x, **settings)
    assert seen == ["a", "Using"]  # once each, as in the untouched job


def test_a_measurement_where_warnings_are_errors_is_no_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        measured(Warns(), torch.randn(32, 64))


def test_other_threads_warn_while_one_measures():
    warned = []

    class Model(Warns):
        def forward(self, x):
            other = Thread(target=lambda: warnings.warn("from another thread", stacklevel=1))
            other.start()
            other.join()
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: warned.append(str(message))
        measured(Model(), torch.randn(32, 64))
    assert set(warned) == {"from another thread"}
