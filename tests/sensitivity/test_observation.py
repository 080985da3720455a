"""What follow() measures with: the job's gradient at the model's outputs, on the batch's first examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gact_dist
from gact_dist import Config

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
        backward(model(torch.randn(8, 16), torch.randint(0, 5, (8,))))
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
    assert sensitivities(only_loss, backward_through_loss) != pytest.approx(expected, rel=1e-2)
