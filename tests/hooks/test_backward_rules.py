"""Every differentiable operator of torch under the hooks: its gradient's error is what its derivative predicts.

What an operator saves is rounded at 8, 4 and 2 bits by a step with min_numel=0. The prediction is linear: the same
errors of the same saved tensors, scaled down to where only the derivative counts, and the change of the gradient scaled
up again. A backward that compares what was saved, divides by it or takes its root, log or sign is not linear in the
error, by orders of magnitude, unless hooks/backward_rules.py keeps it exactly. docs/backward_rules.md has the numbers.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import gact_dist
from gact_dist import Config
from gact_dist._torch_internals import saved_handles
from gact_dist.hooks.backward_rules import CONDITIONAL, RULES, operator_of

pytest.importorskip("expecttest", reason="torch.testing._internal needs it: pip install expecttest")
from torch.testing._internal.common_methods_invocations import op_db

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (8, 4, 2)
# Errors are scaled by this: far below a step, far above what float64 rounds.
SCALE = 2.0**-12
# At 2 bits a step is a third of the range: the second-order term of a smooth backward may be several times the first.
MOST = {8: 2.0, 4: 4.0, 2: 16.0}
# Of the gradient's norm: below it an error is of no interest, whatever the prediction.
SMALLEST = 2e-3
# In the suite, of each operator: those of its first samples that save something in a place where none before did.
SAMPLES_IN_THE_SUITE = 64

NOT_WALKED = {
    "linalg_eig": "torch refuses a gradient that depends on the phase of the eigenvectors, as a random one does"
}


TABLE = {**{operator: (rule,) for operator, rule in RULES.items()}, **CONDITIONAL}
# Rows that no sample of torch's reaches on a CPU: other devices, in-place forms, and what has no OpInfo.
NOT_MET = {
    *("BatchNormNoUpdate", "CudnnAttention", "CudnnBatchNorm", "CudnnGridSampler", "EfficientAttention"),
    *("FakeQuantizeLearnablePerChannelAffine", "FakeQuantizeLearnablePerTensorAffine", "ForeachDiv", "ForeachMaximum"),
    *("ForeachMinimum", "ForeachNorm", "ForeachPow", "FusedRmsNorm", "GridSampler2DCpuFallback", "Igamma", "Igammac"),
    *("MiopenBatchNorm", "NativeBatchNormLegitNoTraining", "RreluWithNoiseFunctional", "SpecialZeta", "StandardGamma"),
    *("ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention", "ScaledDotProductFlashAttentionForCpu"),
    *("ScaledDotProductFusedAttentionOverrideable", "WeightNormInterface"),
}
NOT_IN_EVERY_TORCH = {"Aminmax", "Cholesky", "LinalgMatrixSqrth"}  # absent in 2.11; from 2.14 on; before 2.14
MET_FROM_2_15 = {"ScaledDotProductFlashAttentionForCpu"}
IN_PLACE = {("LeakyRelu", "result"), ("RreluWithNoise", "result")}

OPERATORS = {op.formatted_name: op for op in op_db if op.supports_autograd and op.formatted_name not in NOT_WALKED}


class Exact:
    """What the graph holds of a saved tensor in the untouched job, and for a while another in its place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.replacement = tensor.detach(), None

    def restore(self) -> Tensor:
        return self.tensor if self.replacement is None else self.replacement


def cases(op: Any) -> Iterator[Any]:
    """The samples of an operator."""
    supported = op.supported_dtypes("cpu")
    dtypes = (torch.float64, torch.float32, torch.complex128, torch.complex64)
    dtype = next((dtype for dtype in dtypes if dtype in supported), None)
    if dtype is not None:
        yield from op.sample_inputs("cpu", dtype, requires_grad=True)


def outcome(op: Any, sample: Any) -> list[Tensor]:
    """The results that have a gradient, the same random numbers in every run."""
    torch.manual_seed(0)
    result = op(sample.input, *sample.args, **sample.kwargs)
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.grad_fn is not None and leaf.layout == torch.strided]


def operands(sample: Any) -> list[Tensor]:
    found = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]


def nodes_below(results: list[Tensor]) -> Iterator[Any]:
    """The nodes of a graph, in an order that two graphs of the same operator share."""
    seen, nodes = set(), [result.grad_fn for result in results]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [below for below, _ in node.next_functions]


def saved(results: list[Tensor]) -> list[Any]:
    """What a graph holds."""
    return [handle for node in nodes_below(results) for _, handle in saved_handles(node)]


@cache
def telling(name: str) -> tuple[list[Any], set[tuple[str, str]]]:
    """Samples of an operator that save something where none before did, and these places: (operator, slot)."""
    found: list[Any] = []
    places: set[tuple[str, str]] = set()
    for sample in islice(cases(OPERATORS[name]), SAMPLES_IN_THE_SUITE):
        with warnings.catch_warnings(), saved_tensors_hooks(Exact, Exact.restore):
            warnings.simplefilter("ignore")
            nodes = list(nodes_below(outcome(OPERATORS[name], sample)))
        here = {(operator_of(node.name()), slot) for node in nodes for slot, _ in saved_handles(node)}
        if not here <= places or not found:
            found.append(sample)
            places |= here
    return found, places


def gradient(results: list[Tensor], sample: Any) -> list[Tensor] | None:
    """None where it is not a dense one."""
    torch.manual_seed(1)
    weights = [torch.randn_like(result) for result in results]
    found = torch.autograd.grad(results, operands(sample), weights, retain_graph=True, allow_unused=True)
    parts = [part for part in found if part is not None]
    return parts if all(part.layout == torch.strided for part in parts) else None


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Where both are not finite, the rounding has not changed it."""
    differences = [(x - y).abs()[x.isfinite() | y.isfinite()].double() for x, y in zip(a, b, strict=True)]
    return math.sqrt(sum(float(part.square().sum()) for part in differences))


def norm(a: list[Tensor]) -> float:
    return math.sqrt(sum(float(part[part.isfinite()].abs().double().square().sum()) for part in a))


def has_nan(handle: Any) -> bool:
    return isinstance(handle, Exact) and bool(handle.tensor.isnan().any())


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rounded(op: Any, sample: Any, bits: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Gradient and saved tensors of a first step."""
    gact = gact_dist.attach(nn.Identity(), config=Config(policy="uniform", bits=bits, min_numel=0))
    try:
        with gact.step():
            results = outcome(op, sample)
        return gradient(results, sample), [h.restore() if hasattr(h, "restore") else None for h in saved(results)]
    finally:
        gact.detach()


def walk(op: Any, sample: Any) -> int:
    """Check one sample at all widths; returns 0 where there is nothing to check, otherwise 1."""
    with saved_tensors_hooks(Exact, Exact.restore):
        results = outcome(op, sample)
    exact = gradient(results, sample) if results and operands(sample) else None
    if not exact:
        return 0
    handles = saved(results)
    for bits in WIDTHS:
        found, decoded = rounded(op, sample, bits)
        error, size = distance(found, exact), norm(exact)
        if error == 0 or (math.isnan(error) and any(has_nan(handle) for handle in handles)):
            continue  # a group with a NaN in it is NaN: loud, and the untouched job has a NaN as well
        for handle, tensor in zip(handles, decoded, strict=True):
            if isinstance(handle, Exact) and tensor is not None and not same(tensor, handle.tensor):
                handle.replacement = torch.lerp(handle.tensor, tensor, SCALE)
        predicted = distance(gradient(results, sample), exact) / SCALE
        for handle in handles:
            if isinstance(handle, Exact):
                handle.replacement = None
        assert error <= MOST[bits] * predicted + SMALLEST * size + 1e-9, (bits, error, predicted, size)
    return 1


def walked(name: str, samples: Iterable[Any]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(walk(OPERATORS[name], sample) for sample in samples)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_error_of_the_gradient_is_what_the_derivative_predicts(name):
    walked(name, telling(name)[0])


@pytest.mark.large
def test_every_row_of_the_table_is_met():
    places = set().union(*(telling(name)[1] for name in OPERATORS))
    rows = {(operator, slot) for operator, rules in TABLE.items() for rule in rules for slot in rule.slots}
    absent = {name for name in NOT_IN_EVERY_TORCH if not hasattr(torch._C._functions, f"{name}Backward0")}
    if "nextafter" not in OPERATORS:  # 2.11 has a node for it, which has no derivative
        absent.add("Nextafter")
    assert {row for row in rows - places if row[0] not in NOT_MET | absent} == IN_PLACE
    assert NOT_MET & {operator for operator, _ in rows & places} <= MET_FROM_2_15


@pytest.mark.large
def test_on_all_samples_of_torch():
    numbers = {name: walked(name, cases(OPERATORS[name])) for name in OPERATORS}
    page = " ".join((ROOT / "docs" / "backward_rules.md").read_text().split())
    assert re.search(rf"{sum(map(bool, numbers.values()))} operators in {sum(numbers.values()):,} cases", page)
