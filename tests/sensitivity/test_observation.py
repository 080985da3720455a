"""What an adaptation measures with: a part of the batch or all of it; under follow() the gradient at the outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.sensitivity import Observation

SETTINGS = Config(bits=4, adapt_interval=100, calibration_samples=4, min_numel=16)


class Classifier(nn.Module):
    """Inputs [batch, 16] and labels [batch] -> what a test asks for, of which any part may be in the job's loss."""

    def __init__(self, outputs: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)
        self.dropout, self.outputs = nn.Dropout(0.1), outputs

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        logits = self.head(torch.tanh(self.dropout(self.second(hidden))))
        return self.outputs(hidden, logits, F.cross_entropy(logits, labels))


def only_loss(hidden: Tensor, logits: Tensor, loss: Tensor) -> Any:
    return (loss,)


def beside_logits(hidden: Tensor, logits: Tensor, loss: Tensor) -> Any:
    return {"loss": loss, "logits": logits}


def beside_every_state(hidden: Tensor, logits: Tensor, loss: Tensor) -> Any:
    return loss, {"hidden_states": [hidden, logits], "logits": logits, "rows": logits.view(-1)}


def backward_through_loss(outputs: Any) -> None:
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    loss.backward()


def backward_through_all(outputs: Any) -> None:
    """The loss and a penalty on what it is computed from."""
    loss, others = outputs
    (loss + 0.1 * others["logits"].square().mean() + 0.01 * others["hidden_states"][0].square().mean()).backward()


def penalised(hidden: Tensor, logits: Tensor, loss: Tensor) -> Any:
    return (loss + 0.1 * logits.square().mean() + 0.01 * hidden.square().mean(),)


def sensitivities(outputs: Callable[..., Any], backward: Callable[[Any], None]) -> dict[str, float]:
    """What follow() measures of the tensors that the layers save."""
    torch.manual_seed(0)
    model = Classifier(outputs)
    gact = gact_dist.attach(model, config=SETTINGS).follow()
    for _ in range(2):
        torch.manual_seed(1)
        backward(model(torch.randn(32, 16), torch.randint(0, 5, (32,))))  # a quarter is measured, in one part
        model.zero_grad()
    gact.detach()
    assert gact.adaptation is not None
    # a line of this file is part of a name, and so are the operators that only a penalty has
    return {name: value for name, value in gact.adaptation.sensitivity.items() if "Linear" in name or "Tanh" in name}


@pytest.mark.parametrize("outputs", [beside_logits, beside_every_state])
def test_a_loss_beside_what_it_is_computed_from_counts_once(outputs):
    expected = sensitivities(only_loss, backward_through_loss)
    assert expected
    # equal random directions; what is left of a gradient that others pass on is a rounding error
    assert sensitivities(outputs, backward_through_loss) == pytest.approx(expected, rel=1e-5)


def test_outputs_that_the_job_uses_beside_the_loss_count_as_well():
    expected = sensitivities(penalised, backward_through_loss)
    # the gradient is held at what the job had, where the loss function's is taken at the rounded logits
    assert sensitivities(beside_every_state, backward_through_all) == pytest.approx(expected, rel=2e-3)
    assert sensitivities(only_loss, backward_through_loss) != pytest.approx(expected, rel=5e-3)


class Spectrum(nn.Module):
    """[batch, 16] -> complex [batch, 17]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.second(torch.tanh(self.first(x))))


def test_both_parts_of_a_complex_output_count():
    torch.manual_seed(0)
    model, x = Spectrum(), torch.randn(4, 16)
    observation = Observation(((x,), {}), examples=4)
    spectrum = model(x)
    assert observation.outputs(spectrum)
    loss = (spectrum * torch.exp(1j * torch.randn(17))).real.mean()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    found = torch.autograd.grad(observation.loss(model), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(found, expected, strict=True))
    # each number has the modulus of the mean's factor
    assert observation.squared_gradient == pytest.approx(spectrum.numel() / spectrum.numel() ** 2, rel=1e-5)


NODES = 24


class GraphNetwork(nn.Module):
    """Features [nodes, 16] and an adjacency [nodes, nodes] in any layout -> [nodes, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 5)

    def forward(self, batch: Any) -> Tensor:
        adjacency = batch["adjacency"]
        return adjacency @ self.head(torch.tanh(adjacency @ self.first(batch["x"])))


def graph_batch(kind: str) -> Any:
    torch.manual_seed(0)
    dense = (torch.rand(NODES, NODES) < 0.2).float() + torch.eye(NODES)
    layout = {"coo": torch.sparse_coo, "csr": torch.sparse_csr}.get(kind)
    adjacency = dense if layout is None else dense.to_sparse(layout=layout)
    batch = {"x": torch.randn(NODES, 16), "adjacency": adjacency}
    return MappingProxyType(batch) if kind == "immutable" else batch


def graph_sensitivities(kind: str, way: str, examples: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, batch = GraphNetwork(), graph_batch(kind)
    gact = gact_dist.attach(model, config=replace(SETTINGS, calibration_samples=examples))
    if way == "follow":
        gact.follow()
    for _ in range(2):
        with gact.step() if way == "step" else nullcontext():
            loss = model(batch).square().mean()
        loss.backward()
        model.zero_grad()
    if way == "step":
        with gact.step(lambda part: model(part).square().mean(), batch):
            model(batch)
    assert gact.adaptation is not None
    return gact.adaptation.sensitivity


@pytest.mark.parametrize("way", ["step", "follow"])
@pytest.mark.parametrize("kind", ["dense", "immutable", "coo", "csr"])
def test_a_graph_that_cannot_be_sliced_is_measured_whole_in_the_same_step(kind, way, caplog):
    found = graph_sensitivities(kind, way, examples=4)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    dense = (
        r"the model does not run on the first 4 examples of a batch \((mm: )?mat1 and mat2 shapes cannot be multiplied"
    )
    assert [bool(re.match(dense, text)) for text in logged] == ([] if kind in ("coo", "csr") else [True])
    assert found == graph_sensitivities(kind, way, examples=NODES)


def test_an_error_of_the_loss_function_on_the_whole_batch_is_the_one_that_is_raised(caplog):
    model, sizes = nn.Linear(16, 5), []

    def loss_fn(batch):
        sizes.append(len(batch))
        raise ValueError(f"no batch of {len(batch)}")

    gact = gact_dist.attach(model, config=SETTINGS)
    with pytest.raises(ValueError, match="no batch of 8"):
        gact.calibrate(loss_fn, torch.randn(8, 16), samples=4)
    assert sizes == [2, 4, 8, 8]  # and at last without anything of ours


def test_running_out_of_memory_on_a_part_is_no_reason_to_try_all_of_it(caplog):
    model, sizes = nn.Linear(16, 5), []

    def loss_fn(batch):
        sizes.append(len(batch))
        raise torch.OutOfMemoryError("no memory")

    gact_dist.attach(model, config=SETTINGS).calibrate(loss_fn, torch.randn(8, 16), samples=2)
    assert set(sizes) == {2, 1}


def test_a_batch_that_was_refused_once_stays_whole_when_memory_runs_out(caplog):
    model, sizes = nn.Linear(16, 5), []

    def loss_fn(batch):
        sizes.append(len(batch))
        if len(batch) < 8:
            raise ValueError("of another size")
        raise torch.OutOfMemoryError("no memory")

    gact_dist.attach(model, config=SETTINGS).calibrate(loss_fn, torch.randn(8, 16), samples=2)
    # two examples, then all: to find what need not be stored, to measure, by perturbation
    assert sizes == [2, 8, 8, 8]
