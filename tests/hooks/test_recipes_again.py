"""Recipes that come out as in the step before: the same, found by a few looks, and found out anew where a graph is
another."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from emulation import needs_compiler
from torch import Tensor, nn

import gact_dist
from gact_dist import Config
from gact_dist.hooks import derived, sinks
from gact_dist.hooks.recipes_again import RecipeAgain

WIDTH, TOKENS = 64, 128
SETTLED = 14
"""steps after which the plan is there, and all that settles has settled"""


class Block(nn.Module):
    """Norms, activation functions, products, sums, views, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(4, -1, 4, WIDTH // 4).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q * 0.5, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * F.dropout(self.up(y) * self.scale, 0.1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1),
            nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 8, 3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unflatten(-1, (4, 16)).movedim(-2, 1)[:, :3].contiguous())


class Job:
    """Steps at level L2 whose plan stays, with the gradients of each."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gact = gact_dist.attach(model, config=Config.from_level("L2", adapt_interval=1000, min_numel=256))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(self, x: Tensor) -> list[Tensor]:
        """The gradients of a step, which updates the parameters."""

        def loss_fn(x: Tensor) -> Tensor:
            return self.model(x).square().mean()

        with self.gact.step(loss_fn, x):
            loss = loss_fn(x)
        loss.backward()
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of tensors for which a recipe was looked for."""
    found: list[str] = []
    search = derived.Derived._search

    def noted(self: derived.Derived, name: str, *args: object) -> object:
        found.append(name)
        return search(self, name, *args)

    monkeypatch.setattr(derived.Derived, "_search", noted)
    return found


def gradients(make: Callable[[], nn.Module], steps: int, vary: Callable[[nn.Module, int], None]) -> list[list[Tensor]]:
    """vary: called with the model and the number of a step before it."""
    torch.manual_seed(0)
    job, x = Job(make()), torch.randn(4, TOKENS, WIDTH)
    found = []
    for number in range(steps):
        vary(job.model, number)
        torch.manual_seed(number)
        found.append(job.step(x))
    job.gact.detach()
    return found


def unchanged(model: nn.Module, number: int) -> None:
    """Nothing varies."""


@needs_compiler
@pytest.mark.parametrize("make", [lambda: nn.Sequential(Block(), Block()), Images], ids=["text", "images"])
def test_no_recipe_is_looked_for_in_later_steps(make: Callable[[], nn.Module], searches: list[str]) -> None:
    torch.manual_seed(0)
    job, x = Job(make()), torch.randn(4, TOKENS, WIDTH)
    for _ in range(SETTLED):
        job.step(x)
    made = {row.name for row in job.gact.report().rows if row.codec == "derived"}
    assert len(made) >= 3
    searches.clear()
    job.step(x)
    assert not made & {*searches}
    job.gact.detach()


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Block(), Block()), Images], ids=["text", "images"])
def test_gradients_are_those_of_recipes_that_are_looked_for(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, though the parameters that recipes copy change from step to step."""
    found = gradients(make, SETTLED + 2, unchanged)
    monkeypatch.setattr(sinks, "recipe_again", lambda *_: None)
    for ours, others in zip(found, gradients(make, SETTLED + 2, unchanged), strict=True):
        assert all(map(torch.equal, ours, others))


def _sliced(y: Tensor, start: int) -> Tensor:
    return y[..., start : start + WIDTH // 2].clone()


def _attended(y: Tensor, z: Tensor, mask: Tensor | None) -> Tensor:
    """Not fused, for it has dropout."""
    q, k = y.unflatten(-1, (4, -1)), z.unflatten(-1, (4, -1))
    return F.scaled_dot_product_attention(q, k, k, mask, dropout_p=0.1).flatten(-2)


VARIED: dict[str, tuple[Callable[..., Tensor], object, object]] = {
    "a constant": (lambda y, _z, how: F.gelu(y, approximate=how), "none", "tanh"),
    "the factor of a sum": (lambda y, z, alpha: torch.add(y, z, alpha=alpha), 1.0, -3.0),
    "a number": (lambda y, _z, factor: F.gelu(y) * factor, 0.5, 2.0),
    "where a slice begins": (lambda y, _z, start: _sliced(y, start), 0, WIDTH // 2),
    "which tensor": (lambda y, z, first: F.gelu((y, z)[first]), 0, 1),
    "which part": (lambda y, _z, part: y.chunk(2, -1)[part].clone(), 0, 1),
    "one twice, or both": (lambda y, z, second: torch.add(y, (y, z)[second]), 0, 1),
    "how many are joined": (lambda y, _z, size: torch.cat(y.split(size, -1), -1), WIDTH // 2, WIDTH // 4),
    "a mask": (_attended, torch.ones(4, 4).tril() > 0, torch.linspace(-1.0, 1.0, 4)),
    "whether there is a mask": (_attended, torch.ones(4, 4).tril() > 0, None),
    "which is which": (lambda y, z, first: torch.sub((y, z)[first], (y, z)[1 - first]), 0, 1),
}
"""(what is made of two tensors that are saved, values of what varies)"""


class Varying(nn.Module):
    """The same lines and shapes in each step, and another graph behind what is saved."""

    def __init__(self, make: Callable[..., Tensor], value: object) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)
        self.make, self.value = make, value
        self(torch.zeros(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), self.second(x)
        beside = F.silu(y) * z.square()  # which saves both
        return self.last(self.make(y, z, self.value)) + beside


@needs_compiler
@pytest.mark.parametrize("name", VARIED)
def test_a_graph_that_varies_has_recipes_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, *values = VARIED[name]
    refused: list[int] = []
    call = RecipeAgain.__call__

    def noted(self: RecipeAgain, tensor: Tensor) -> object:
        found = call(self, tensor)
        refused.append(found is None)
        return found

    monkeypatch.setattr(RecipeAgain, "__call__", noted)

    def vary(model: nn.Module, number: int) -> None:
        model.value = values[number in (SETTLED, SETTLED + 1, SETTLED + 3)]

    found = gradients(lambda: Varying(make, values[0]), SETTLED + 5, vary)
    # a recipe reads the number and the mask; another tensor settles anew
    assert any(refused) is (name not in ("a number", "a mask", "which tensor"))
    assert not all(refused)
    monkeypatch.setattr(sinks, "recipe_again", lambda *_: None)
    for number, (ours, others) in enumerate(
        zip(found, gradients(lambda: Varying(make, values[0]), SETTLED + 5, vary), strict=True)
    ):
        assert all(map(torch.equal, ours, others)), number


@needs_compiler
def test_the_recipe_of_an_earlier_step_keeps_nothing_of_its_graph() -> None:
    torch.manual_seed(0)
    job, x = Job(nn.Sequential(Block(), Block())), torch.randn(4, TOKENS, WIDTH)
    for _ in range(SETTLED):
        job.step(x)
    settled = job.gact._schedule.hooks._settled._known.values()
    known = [met.again.packer for met in settled if met.again is not None and isinstance(met.again.packer, RecipeAgain)]
    assert len(known) >= 3
    pending, seen = [*known], set()
    while pending:
        held = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        assert not isinstance(held, (Tensor, torch.autograd.graph.Node))
        if isinstance(held, (list, tuple)):
            pending += held
        elif not isinstance(held, type) and type(held).__module__.startswith("gact_dist"):
            names = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
            pending += [getattr(held, name) for name in (*names, *vars(held))] if hasattr(held, "__dict__") else []
            pending += [getattr(held, name, None) for name in names]
    job.gact.detach()
