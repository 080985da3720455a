"""Does rounding add to the gradient what was predicted? Random models, measured and then rounded.

    python -m benchmarks.reliability.fuzz_predictions --cases 1000 --json benchmarks/results/reliability.json

Each model is a list of operators as in fuzz_settled_saves.py, with a few more in which parts of a tensor, or what is
behind a relu, become another's operands. What a step would derive is derived. The sensitivity of each saved tensor is
measured, with the model cut at its linear layers and norms; then the gradient is computed under other roundings to 8
bits, where the error is small and the derivative tells it. The mean squared error must not be three times what was
predicted. Single tensors of such small models have estimates with long tails; factors of 1.5 and less say nothing.
Not judged are cases whose error is more than a hundredth of the gradient or lost in float32, or not finite.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.reliability import cases
from benchmarks.reliability.fuzz_settled_saves import (
    BATCH,
    NAMES,
    OPERATORS,
    TOKENS,
    WIDTH,
    Case,
    Instruction,
    Job,
    drawn,
)
from gact_dist import Config
from gact_dist.hooks import SavedTensorHooks
from gact_dist.policies import Plan
from gact_dist.sensitivity import measure, sections

BITS, MIN_NUMEL = 8, 64
PROBES, DRAWS = 24, 16
FACTOR = 3.0
"""of the predicted error, that the measured one must not reach"""
LARGEST, LEAST = 1e-2, 1e-11
"""of the squared gradient, an error that is judged"""
_NOT_SMOOTH = frozenset(("exponential", "cast"))
"""operators whose results overflow, or whose own rounding is as large as ours"""


def _experts(job: Job, x: Tensor, y: Tensor, number: int) -> Tensor:
    shared = x * y if number % 2 else F.silu(x) * y
    sizes = (2, 1, 1) if number % 3 else (3, 1)
    return torch.cat([layer(part) for layer, part in zip(job.linear, shared.split(sizes, 0), strict=False)])


def _two_ways(job: Job, shared: Tensor) -> Tensor:
    return torch.cat([job.linear[0](shared[:, :2]), 2.0 * shared[:, 2:]], 1)


MORE: dict[str, Callable[[Any, Tensor, Tensor, int], Tensor]] = {
    "experts": _experts,
    "doubled relu": lambda job, x, y, n: 2.0 * F.relu(x),
    "relu of a norm": lambda job, x, y, n: job.linear[n % 3](0.5 * F.relu(job.layer_norm[n % 2](x)) + y),
    "parts in two ways": lambda job, x, y, n: _two_ways(job, x * y),
}


class Model(Job):
    """Runs one of these lists."""

    def operator(self, name: str) -> Callable[[Any, Tensor, Tensor, int], Tensor]:
        return MORE.get(name) or OPERATORS[name]


class Outcome(NamedTuple):
    """The mean squared error of a gradient, summed over all parameters."""

    predicted: float
    measured: float
    square: float
    """of the gradient itself"""

    @property
    def is_judged(self) -> bool:
        finite = all(map(math.isfinite, self))
        return (
            finite
            and LEAST * self.square < max(self.predicted, self.measured)
            and self.measured <= (LARGEST * self.square)
        )

    @property
    def differs(self) -> bool:
        return self.is_judged and self.measured > FACTOR * self.predicted


def program_of(seed: int) -> list[Instruction]:
    """A list of operators, drawn at random."""
    numbers = random.Random(seed)
    names = [name for name in (*NAMES, *MORE) if name not in _NOT_SMOOTH]
    return [drawn(numbers, names) for _ in range(numbers.randrange(4, 11))]


def outcome_of(program: list[Instruction], seed: int, draws: int = DRAWS) -> Outcome:
    """Measure and round one model. seed: of its parameters and its batch. draws: roundings to average over."""
    model = Model(Case(seed, [program], [0], BITS, MIN_NUMEL, autocast=False))
    model.program = program
    x, parameters = torch.randn(BATCH, TOKENS, WIDTH), list(model.parameters())

    def loss() -> Tensor:
        torch.manual_seed(seed + 1)  # of dropout
        return model(x)

    def gradient() -> list[Tensor]:
        found = torch.autograd.grad(loss(), parameters, allow_unused=True)
        return [torch.zeros(()) if one is None else one for one in found]

    hooks = SavedTensorHooks(model, Config(policy="uniform", bits=BITS, derive=True, min_numel=MIN_NUMEL), 0)
    for _ in range(2):  # as after a step: what can be derived is known
        with hooks.rehearsal(Plan(default=BITS)):
            loss()
    found = measure(hooks, model, loss, seed=1, probes=PROBES)
    predicted = sum(float(item.variance[BITS - 1]) for item in found)
    names = {item.name for item in found} | set(hooks.state_dict()["derived"]["elements"])
    exact, measured = gradient(), 0.0
    for draw in range(draws):
        with hooks.rehearsal(Plan(dict.fromkeys(names, BITS), BITS), draw=draw + 1):
            root = loss()
        rounded = torch.autograd.grad(root, parameters, allow_unused=True)
        apart = [one - other for one, other in zip(rounded, exact, strict=True) if one is not None]
        measured += sum(float(part.double().square().sum()) for part in apart) / draws
    hooks.close()
    return Outcome(predicted, measured, sum(float(one.double().square().sum()) for one in exact))


def check(seed: int, counts: collections.Counter[str]) -> str | None:
    """What differs in a case, None if nothing does. counts: of what happened are added to it."""
    program = program_of(seed)
    outcome = outcome_of(program, seed)
    counts["cases"] += 1
    counts["judged"] += outcome.is_judged
    return f"program_of({seed}): {outcome}, {program}" if outcome.differs else None


def main() -> None:
    entry = "fuzz of predictions"
    parser = cases.parser_of(__doc__, entry)
    parser.add_argument("--in-sections", action="store_true", help="differentiate all that can be in sections")
    arguments = parser.parse_args()
    if arguments.in_sections:
        sections.LEAST_BYTES = 1
    cases.run(arguments, entry, check, in_sections=arguments.in_sections)


if __name__ == "__main__":
    main()
