"""What torch imports while a model is measured has torch's own functions, not what stands in their places then."""

from __future__ import annotations

import subprocess
import sys

FIRST_MEASUREMENT = """
import sys
import torch
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.sensitivity import measure

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.layer(self.norm(x))

model = torch.nn.Sequential(Block(), Block(), Block())
batch = torch.randn(4, 8)
assert "torch._dynamo" not in sys.modules  # as no optimizer has been made
measure(SavedTensorHooks(model, Config(min_numel=1), 0), model, lambda: model(batch).sum(), seed=1)
from torch._dynamo.variables.torch import supported_ctx_manager_classes
assert torch.autograd.graph.disable_saved_tensors_hooks in supported_ctx_manager_classes
"""


def test_the_compiler_knows_torchs_own_functions_after_a_first_measurement():
    done = subprocess.run([sys.executable, "-c", FIRST_MEASUREMENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
