"""Recurrent networks of torch: one function of several layers, with dropout between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.report import MemoryReport

STEPS, BATCH, TIME, INPUTS, HIDDEN = 3, 8, 32, 48, 64


def trained(kind: type[nn.RNNBase], config: Config, dropout: float = 0.3) -> tuple[list[Tensor], MemoryReport]:
    """(gradients of all steps, report on the last)."""
    torch.manual_seed(0)
    model, x = kind(INPUTS, HIDDEN, 2, dropout=dropout, batch_first=True), torch.randn(BATCH, TIME, INPUTS)
    gact = gact_dist.attach(model, config=config)
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        with gact.step():
            loss = model(x)[0].square().mean()
        loss.backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found, gact.report()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("policy", ["uniform", "exact"])
def test_noise_between_layers_takes_one_bit(kind, policy):
    config = Config(policy=policy, bits=4, min_numel=16) if policy == "uniform" else Config(policy=policy)
    found, report = trained(kind, config)
    exact, _ = trained(kind, Config(policy="exact"))
    noise = [row for row in report.rows if row.shape == (TIME, BATCH, HIDDEN) and row.codec == "binary"]
    assert len(noise) == (policy == "uniform")
    for one, other in zip(found, exact, strict=True):
        if policy == "exact":
            assert torch.equal(one, other)
        else:  # a rounding to 4 bits, and the masks of the untouched job
            assert float((one - other).norm() / other.norm()) < 0.3


def test_states_of_zeros_are_no_noise():
    """The first hidden state is a copy of zeros, and another one in a stateful job."""
    _, report = trained(nn.LSTM, Config(policy="uniform", bits=4, min_numel=16), dropout=0.0)
    assert not any(row.codec == "binary" for row in report.rows)


def test_the_report_names_workspaces():
    _, report = trained(nn.LSTM, Config(policy="uniform", bits=4, min_numel=16))
    assert ("workspaces that operators keep" in str(report)) is (report.opaque_bytes > report.retained_bytes / 10)
    rows = [row for row in report.rows if row.dtype == torch.uint8]
    assert report.opaque_bytes == sum(row.bytes for row in rows) > 0
    assert all("Workspace" in row.name for row in rows)
    _, exact = trained(nn.LSTM, Config(policy="exact"))
    assert exact.opaque_bytes == report.opaque_bytes
    _, linear = trained(nn.RNN, Config(policy="uniform", bits=4, min_numel=16))
    assert linear.opaque_bytes == 0
    assert "workspaces that operators keep" not in str(linear)


class Bytes(nn.Module):
    """A product with bytes, which it saves, of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4096))

    def forward(self, image: Tensor) -> Tensor:
        return (self.weight * image.clone()).sum()  # what the loop hands over is not stored


def test_bytes_of_the_user_are_no_workspace():
    model, image = Bytes(), torch.randint(256, (4096,), dtype=torch.uint8)
    gact = gact_dist.attach(model, config=Config(policy="uniform", bits=4))
    for _ in range(2):  # of these only the first is observed
        with gact.step():
            model(image)
        (row,) = gact.report().rows
        assert (row.dtype, row.shape, row.bytes) == (torch.uint8, (4096,), 4096)
        assert gact.report().opaque_bytes == 0
        assert "workspaces" not in str(gact.report())
