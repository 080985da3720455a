"""Does what has settled come out as it would have been found? Random models that change a little between steps.

    python -m benchmarks.reliability.fuzz_settled_saves --cases 10000 --json benchmarks/results/reliability.json

A job's hooks recognise what they have seen in the steps before, in C++, and do the same again (settled.py and
recipes_again.py in gact_dist/hooks). Here a model is a list of operators that one loop runs: linear layers, norms,
activation functions, products, sums, parts, views, attention, dropout. It has three variants, which differ in one or
two places: another operand, another number (a constant, a part, a parameter), another operator. Nine steps run one
variant or the other, so that tensors that look alike and are saved in the same line are of other graphs. All tensors
are rounded and, where that is possible, made again from others. The job runs twice: with what settles, and as on a
machine without a C++ compiler, where nothing does. Losses and gradients must be the same bit for bit.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reliability import cases
from gact_dist import Config, attach
from gact_dist.hooks import engine
from gact_dist.hooks.recipes_again import RecipeAgain

BATCH, TOKENS, WIDTH, HEADS = 4, 16, 64, 4
VARIANTS, SAME_STEPS, OTHER_STEPS = 3, 3, 6
"""of the first variant as many steps as it takes to settle; then those of any"""
NUMBERS = 12


class Instruction(NamedTuple):
    """An operator, how far back among the tensors that there are its operands lie, and a number."""

    name: str
    first: int
    second: int
    number: int


Program = list[Instruction]


class Case(NamedTuple):
    """The variants of a model, and which of them each step runs."""

    seed: int
    variants: list[Program]
    order: list[int]
    bits: int
    min_numel: int
    autocast: bool


class Job(nn.Module):
    """Runs one of the variants."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.linear = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.layer_norm = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.rms_norm = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.group_norm = nn.GroupNorm(4, TOKENS)
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.dropout = nn.Dropout(0.25)
        self.constant = torch.randn(WIDTH)
        self.hiding = torch.full((TOKENS, TOKENS), -1e9).triu(1)
        self.program: Program = []

    def forward(self, x: Tensor) -> Tensor:
        found = [x * self.vectors[0], x + self.vectors[1]]
        for name, first, second, number in self.program:
            x, y = found[-1 - first % min(3, len(found))], found[-1 - second % min(4, len(found))]
            found.append(self.operator(name)(self, x, y, number))
        latest = [tensor.float() for tensor in found[-3:]]
        return latest[0].mean() + latest[1].square().mean() + latest[2].mean()

    def operator(self, name: str) -> Callable[[Any, Tensor, Tensor, int], Tensor]:
        return OPERATORS[name]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.split(WIDTH, -1)


def _attention(job: Job, x: Tensor, number: int) -> Tensor:
    shape = BATCH, TOKENS, 3, HEADS, WIDTH // HEADS
    q, k, v = job.wide[number % 2](x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
    if number % 4 == 1:
        q, k = k, q
    scale = None if number % 3 else 0.5
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=bool(number % 5), scale=scale)
    return attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


def _attention_in_operators(job: Job, x: Tensor, number: int) -> Tensor:
    parts = _parts(job.wide[number % 2](x))
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    scores = q @ k.transpose(-2, -1) * (0.25, 0.5)[number % 2]
    if number % 4 == 1:
        scores = scores + job.hiding
    elif number % 4 == 2:
        scores = scores.masked_fill(job.hiding < 0, float("-inf"))
    elif number % 4 == 3:
        scores = scores + job.constant[:TOKENS]
    probabilities = scores.softmax(-1)
    attended = (probabilities if number % 3 else job.dropout(probabilities)) @ v
    return attended.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


def _rotated(x: Tensor, number: int) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * (0.5 + number) - other, other * (0.5 + number) + one], -1)


def _gated_parts(job: Job, x: Tensor, number: int) -> Tensor:
    parts = _parts(job.wide[number % 2](x))
    return parts[number % 3] * F.silu(parts[(number + 1) % 3])


def _joined_parts(x: Tensor, y: Tensor, number: int) -> Tensor:
    parts = _parts(torch.cat([x, y], -1))
    return F.gelu(parts[number % 2]) * parts[number // 2 % 2]


def _two_layers(job: Job, x: Tensor, y: Tensor, number: int) -> Tensor:
    operand = (x + y, y, y + y, x)[number % 4]
    return job.linear[0](F.gelu(job.linear[1](F.layer_norm(operand, (WIDTH,)))))


_ACTIVATIONS = (torch.tanh, torch.sigmoid, F.relu, F.softplus, F.elu, F.mish, F.hardswish, F.leaky_relu)

OPERATORS: dict[str, Callable[[Job, Tensor, Tensor, int], Tensor]] = {
    "linear": lambda job, x, y, n: job.linear[n % 3](x),
    "layer norm": lambda job, x, y, n: job.layer_norm[n % 2](x),
    "layer norm of a vector": lambda job, x, y, n: F.layer_norm(
        x, (WIDTH,), job.vectors[n % 3], None, 10.0 ** -(n % 5)
    ),
    "RMS norm": lambda job, x, y, n: job.rms_norm[n % 2](x),
    "group norm": lambda job, x, y, n: job.group_norm(x),
    "gelu": lambda job, x, y, n: F.gelu(x, approximate=("none", "tanh")[n % 2]),
    "gelu of a sum": lambda job, x, y, n: F.gelu((x + y, y + y, x + x)[n % 3]) * 0.5,
    "silu": lambda job, x, y, n: F.silu(x),
    "activation": lambda job, x, y, n: _ACTIVATIONS[n % len(_ACTIVATIONS)](x),
    "product": lambda job, x, y, n: x * y,
    "product with a number": lambda job, x, y, n: x * (0.5, 2.0, -1.0)[n % 3],
    "product with a parameter": lambda job, x, y, n: x * job.vectors[n % 3],
    "product with a constant": lambda job, x, y, n: x * job.constant,
    "square": lambda job, x, y, n: x * x,
    "sum": lambda job, x, y, n: torch.add(x, y, alpha=(1, 2, 0.5)[n % 3]),
    "difference": lambda job, x, y, n: x - y if n % 2 else y - x,
    "sum with a parameter": lambda job, x, y, n: x + job.vectors[n % 3],
    "dropout": lambda job, x, y, n: job.dropout(x),
    "gate": lambda job, x, y, n: F.silu(x) * y,
    "gated parts": lambda job, x, y, n: _gated_parts(job, x, n),
    "joined parts": lambda job, x, y, n: _joined_parts(x, y, n),
    "two layers": lambda job, x, y, n: _two_layers(job, x, y, n),
    "attention": lambda job, x, y, n: _attention(job, x, n),
    "attention in operators": lambda job, x, y, n: _attention_in_operators(job, x, n),
    "rotation": lambda job, x, y, n: _rotated(x, n),
    "cast": lambda job, x, y, n: x.to(torch.bfloat16).to(torch.float32),
    "roll": lambda job, x, y, n: x.roll(n % 4, n % 3),
    "shift": lambda job, x, y, n: F.pad(x[:, n % 3 :], (0, 0, n % 3, 0)),
    "other order": lambda job, x, y, n: x.transpose(0, 1).reshape(BATCH, TOKENS, WIDTH),
    "softmax": lambda job, x, y, n: x.softmax(-1) * y,
    "expanded": lambda job, x, y, n: x[:, n : n + 1].expand(BATCH, TOKENS, WIDTH) * y,
    "clone": lambda job, x, y, n: x.clone(),
    "sum in place": lambda job, x, y, n: (x * 1.5).add_(y),
    "relu in place": lambda job, x, y, n: (x + 0.1).relu_(),
    "where": lambda job, x, y, n: torch.where(y > 0, x, x * 0.5),
    "masked": lambda job, x, y, n: x.masked_fill(y > 1, 0.0) * y,
    "exponential": lambda job, x, y, n: (x, y)[n % 2].exp().clamp(max=3.0),
}
NAMES = list(OPERATORS)


def drawn(numbers: random.Random, names: Sequence[str] = NAMES) -> Instruction:
    """An instruction, drawn at random."""
    return Instruction(numbers.choice(names), numbers.randrange(3), numbers.randrange(4), numbers.randrange(NUMBERS))


def _changed(program: Program, numbers: random.Random) -> Program:
    program = [*program]
    for _ in range(numbers.choice((1, 1, 2))):
        place, other = numbers.randrange(len(program)), drawn(numbers)
        field = numbers.choice(("first", "second", "number", "number", None))
        kept = program[place]
        program[place] = other if field is None else kept._replace(**{field: getattr(other, field)})
    return program


def case_of(seed: int) -> Case:
    """A case, drawn at random."""
    numbers = random.Random(seed)
    program = [drawn(numbers) for _ in range(numbers.randrange(3, 9))]
    variants = [program, *(_changed(program, numbers) for _ in range(VARIANTS - 1))]
    order = [0] * SAME_STEPS + [numbers.randrange(VARIANTS) for _ in range(OTHER_STEPS)]
    return Case(seed, variants, order, numbers.choice((2, 4, 8)), numbers.choice((64, 1024)), numbers.random() < 0.3)


def run(case: Case, settles: bool) -> list[list[Tensor | None]]:
    """The loss and the gradients of each step. settles: false as where there is no C++ compiler."""
    job = Job(case)
    config = Config(policy="uniform", bits=case.bits, min_numel=case.min_numel, derive=True)
    optimizer = torch.optim.SGD(job.parameters(), lr=1e-4)
    found: list[list[Tensor | None]] = []
    with mock.patch.object(engine, "IS_BUILT", engine.IS_BUILT and settles):
        gact = attach(job, config=config)
        for step, variant in enumerate(case.order):
            job.program = case.variants[variant]
            torch.manual_seed(step)
            x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
            with gact.step(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = job(x)
            loss.backward()
            gradients = [tensor.grad for tensor in (x, *job.parameters())]
            found.append([loss.detach(), *(None if one is None else one.clone() for one in gradients)])
            optimizer.step()
            optimizer.zero_grad()
        gact.detach()
    return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    one, other = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))  # NaN as well
    return torch.equal(one, other)


def differences(case: Case) -> list[int]:
    """The steps in which a loss or a gradient differs."""
    steps = zip(run(case, True), run(case, False), strict=True)
    return [step for step, (one, other) in enumerate(steps) if not all(map(_same, one, other))]


def check(seed: int, counts: collections.Counter[str]) -> str | None:
    """What differs in a case, None if nothing does. counts: of what happened are added to it."""
    case = case_of(seed)
    again = RecipeAgain.__call__

    def counted(self: RecipeAgain, tensor: Tensor) -> Any:
        recipe = again(self, tensor)
        counts["recipes that settled and did not fit" if recipe is None else "recipes made again"] += 1
        return recipe

    with mock.patch.object(RecipeAgain, "__call__", counted):
        steps = differences(case)
    counts["cases"] += 1
    return f"case_of({seed}) differs in the steps {steps}: {case}" if steps else None


def main() -> None:
    entry = "fuzz of settled saves"
    cases.run(cases.parser_of(__doc__, entry).parse_args(), entry, check)


if __name__ == "__main__":
    main()
