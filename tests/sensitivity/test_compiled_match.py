"""Compiled regions are measured through the model as it was before torch.compile, where they save the same values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_models import gpt, loss_of, mlp
from torch import Tensor

from gact_dist import Config
from gact_dist.hooks import OperatorObserver, Recorded, SavedTensorHooks
from gact_dist.hooks.given import Given
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure, one_pass
from gact_dist.sensitivity.compiled_match import EagerTensor, EagerTensors, seen
from gact_dist.sensitivity.differentiable_attention import ScaledDotProductAttention
from gact_dist.sensitivity.measuring_mode import MeasuringMode
from gact_dist.sensitivity.parts import OpaqueError
from gact_dist.sensitivity.perturbation import PROBE_BITS


class Job:
    """A GPT with compiled regions, and its hooks."""

    def __init__(self, what: str, dropout: float = 0.0, form: str = "eager") -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.model, self._batch = gpt(dropout=dropout)
        for module in self.model.blocks if what == "blocks" else [self.model]:
            module.compile(backend="aot_eager")
        self.hooks = SavedTensorHooks(self.model, Config(min_numel=16, compile_hooks=form), 0)
        self.hooks.plan = Plan(default=PROBE_BITS)  # both estimators have the operating point of a perturbation
        self.forwards = 0

    def loss(self) -> Tensor:
        self.forwards += 1
        return loss_of(self.model)(self._batch)

    def measured(self, estimator: str = "one-pass", seed: int = 0, probes: int = 1):
        self.forwards = 0
        return measure(self.hooks, self.model, self.loss, seed=seed, probes=probes, estimator=estimator)


def test_each_tensor_agrees_with_the_procedure_of_gact():
    job = Job("blocks", dropout=0.1)
    rows = []
    for estimator, probes in (("one-pass", 4), ("perturbation", 4)):
        draws = [job.measured(estimator, 1000 * draw, probes) for draw in range(8)]
        tensors = list(zip(*draws, strict=True))
        rows.append({items[0].name: [item.variance[PROBE_BITS - 1] for item in items] for items in tensors})
        assert {item.by_perturbation for items in draws for item in items} == {estimator == "perturbation"}
    assert len(rows[0]) == 22
    assert list(rows[0]) == list(rows[1])
    for name, found in rows[0].items():
        ours, theirs = torch.stack(found), torch.stack(rows[1][name])
        # a single squared difference of gradients has a relative standard deviation of up to 0.3 in a block's own
        # parameters, more in those before it, which are seen along four directions
        error = ((0.3**2 * theirs.mean() ** 2 + theirs.var() + ours.var()) / 8) ** 0.5
        assert abs(ours.mean() - theirs.mean()) < 3 * error, name


@pytest.mark.parametrize(
    ("what", "form", "tensors", "perturbed"),
    [("blocks", "eager", 22, 0), ("whole", "eager", 22, 0), ("blocks", "inlined", 24, 4), ("whole", "inlined", 24, 4)],
)
def test_few_forwards_are_run_and_nothing_is_compiled_anew(what, form, tensors, perturbed):
    """One without the compiler, two with it, one for the walk; and for what is perturbed one each, and one more.

    The inlined form stores the output of an attention twice.
    """
    job = Job(what, dropout=0.1, form=form)
    found = job.measured()
    assert job.forwards == 4 + bool(perturbed) + perturbed
    assert (len(found), sum(item.by_perturbation for item in found)) == (tensors, perturbed)
    job.loss().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # with hooks, and in this step without


def test_what_cannot_be_walked_without_the_compiler_is_perturbed(monkeypatch):
    def refuses(*_):
        raise OpaqueError("no derivative")

    monkeypatch.setattr(one_pass._ByWalk, "measured", refuses)
    found = Job("blocks").measured()
    assert all(item.by_perturbation and float(item.variance[PROBE_BITS - 1]) > 0 for item in found)
    assert len(found) == 22


def _records(model, batch, mode=None) -> list[Recorded]:
    hooks = SavedTensorHooks(model, Config(min_numel=16), 0)
    with hooks.recording(mode or OperatorObserver()) as records:
        loss_of(model)(batch).backward()
    hooks.close()
    return [record for record in records if isinstance(record, Recorded)]


def _as_region(records, without=(), twice=(), strange=False):
    """{name without the compiler: its partner} where a region saves what the model would, but for a few tensors."""
    model, _ = mlp()
    encoder = SavedTensorHooks(model, Config(min_numel=16), 0).encoder
    kept = [seen(r, r.tensor, encoder) for r in records if r.name not in without]
    kept += [seen(r, r.tensor, encoder) for r in records if r.name in twice]
    if strange:
        kept.append(kept[0]._replace(sample=kept[0].sample._replace(values=kept[0].sample.values.flip(0))))
    saved = [item._replace(name=f":Compiled2D{item.name}#{number}") for number, item in enumerate(kept)]
    eager = EagerTensors()
    eager.add([EagerTensor.of(record, record.tensor, record.node) for record in records])
    partners = eager.partners(saved)
    assert all(name.startswith(f":Compiled2D{partner}#") for name, partner in partners.items())
    return set(partners.values())


def test_what_a_region_recomputes_from_has_no_partner(monkeypatch):
    monkeypatch.setattr(Given, "holds", lambda *_: False)  # as in a model with compiled regions, where it is stored
    model, batch = mlp()
    records = _records(model, batch)
    names = [record.name for record in records if record.compressible]
    everything = set(names)
    assert _as_region(records) == everything
    _, before, after, *_ = names  # the batch, what GELU reads, what it computes
    assert "Gelu" in after
    batch_too = {names[0]}  # it has no graph, which would show what is computed from it
    assert _as_region(records, without=[after]) == everything - {before, after} - batch_too
    assert _as_region(records, without=[before]) == everything - {before} - batch_too
    assert _as_region(records, twice=[after]) == everything - {after}
    assert _as_region(records, without=[names[0]]) == set()  # it was computed from nothing that is known
    assert _as_region(records, strange=True) == set()


def test_names_stand_for_the_same_values_while_measured():
    """Two tensors that one operator saves, as the query and the key of an attention, differ in the order of saving."""
    model, batch = gpt()
    plain, measured = (
        {record.name: record.tensor for record in _records(model, batch, mode) if record.compressible}
        for mode in (OperatorObserver(), MeasuringMode(fits=False))
    )
    assert list(plain) == list(measured)
    for name, tensor in plain.items():
        torch.testing.assert_close(measured[name], tensor, msg=name)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_a_fitted_logsumexp_keeps_that_of_the_forward(masked):
    """Its probabilities then do not sum to one where query and key are rounded."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 6, 8) for _ in range(4))
    mask = torch.ones(6, 6).tril().bool() if masked else None
    rounded = [x + 0.1 * torch.randn_like(x) for x in (q, k, v)]
    scores = [x @ y.transpose(-2, -1) * 8**-0.5 for x, y in ((q, k), (rounded[0], rounded[1]))]
    scores = [s if mask is None else s.masked_fill(~mask, -torch.inf) for s in scores]
    probability = (scores[1] - scores[0].logsumexp(-1, keepdim=True)).exp()
    out = F.scaled_dot_product_attention(q, k, v, mask)
    expected = probability * (grad @ rounded[2].transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)) * 8**-0.5
    replaced = {x.data_ptr(): y for x, y in zip((q, k, v), rounded, strict=True)}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: replaced.get(x.data_ptr(), x)):
        found = ScaledDotProductAttention.apply(*inputs, mask, False, 8**-0.5, False, False)
        gradients = torch.autograd.grad(found, inputs, grad)
    wanted = expected @ rounded[1], expected.transpose(-2, -1) @ rounded[0], probability.transpose(-2, -1) @ grad
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)  # tens of roundings on values of order one
