"""The peak of a step that adapts, counted in live storages, against an ordinary compressed step and the untouched job.

[Note: bound] A step that adapts measures before, or in, the job's own forward. Whatever it holds then is:

    what the hooks hold of the job's step        nothing while gact.step() measures: the job's forward comes after
    boundaries                                   inputs and gradients of all blocks at 8 bits: a few per cent of the
                                                 activations, since a block saves many times its input
    the block that is measured                   1 its exact activations; and its double backward: up to 4 more, of the
                                                 first backward's graph, the gradients of both, and the weights
    parameters' gradients of one block           at any time (they are not kept)

so its peak is at most that of an ordinary compressed step plus five times the exact activations of the largest block on
a quarter of the batch, or on the one example that there is; what is carried from one half of its measurement to the
other is boundaries, and some of those above are not there any more. A large block is divided into sections, of which
only one has its double backward at a time. The first forward keeps nothing of the blocks. In the sizes below
activations outweigh parameters, as in a job for which this package is of use.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_models import CheckpointedGPT, Wrapped, convolutions, plain, selective
from live_storages import saved_bytes
from small_models import Block, TinyGPT, loss_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import gact_dist
from gact_dist import Config
from gact_dist.adaptation import adapter
from gact_dist.hooks import Noted, Replay, SavedTensorHooks
from gact_dist.hooks.roles import Role
from gact_dist.sensitivity import blocks as blocks_room
from gact_dist.sensitivity import differentiable_attention, one_pass, sections
from gact_dist.sensitivity.walk import Measured

WIDTH = 64
Job = tuple[nn.Module, list[nn.Module], tuple[Tensor, Tensor]]
EXAMPLES = 16
AT_ONCE = EXAMPLES // 4  # [Note: parts] in sensitivity/probe.py


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operators make within the context, as long as anything holds them.

    A storage is told from another by its StorageImpl, which lives as long as any tensor of it, in Python or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._nbytes = 0  # of all that are known, those that are gone since they were last looked for among them
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, nbytes = storage._cdata, storage.nbytes()
                if key not in self._known:
                    self._known[key] = StorageWeakRef(storage), nbytes
                    self._nbytes += nbytes
        if self._nbytes > self.peak:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._nbytes = sum(nbytes for _, nbytes in self._known.values())
            self.peak = max(self.peak, self._nbytes)
        return made


def peak_of(run: Callable[[], None]) -> int:
    gc.collect()
    with LiveStorages() as live:
        run()
    return live.peak


def exact_bytes_of_blocks(model: nn.Module, blocks: list[nn.Module], inputs: Tensor) -> list[int]:
    """What each block saves of its own, and its input."""
    given: dict[nn.Module, Tensor] = {}
    handles = [
        block.register_forward_pre_hook(lambda module, args: given.update({module: args[0]})) for block in blocks
    ]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return [saved_bytes(block, lambda b=block: b(given[b].requires_grad_())) for block in blocks]


# -- jobs -------------------------------------------------------------------------------------------------------


def gpt(
    checkpointed: bool = False,
    examples: int = EXAMPLES,
    length: int = 64,
    layers: int = 12,
    how: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> Job:
    """how: its blocks are checkpointed, if that is not as usual."""
    torch.manual_seed(0)
    model = CheckpointedGPT(how or partial(plain, reentrant=False)) if checkpointed else TinyGPT(width=WIDTH)
    model.embedding, model.norm, model.head = nn.Embedding(37, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37)
    model.blocks = nn.ModuleList(Block(WIDTH, 4, 0.0) for _ in range(layers))
    tokens = torch.randint(0, 37, (examples, length + 1))
    return model, [*model.blocks], (tokens[:, :-1], tokens[:, 1:])


def gpt_with_inner_checkpoints() -> Job:
    model, blocks, batch = gpt(examples=1, length=512, layers=4)
    model.blocks = nn.ModuleList(Wrapped(block, reentrant=False) for block in blocks)
    return model, [*model.blocks], batch


class ViT(nn.Module):
    """Images [batch, 3, 32, 32] -> logits [batch, 10]: a transformer on patches of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(12)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def vit() -> Job:
    torch.manual_seed(0)
    model = ViT()
    return model, [*model.layers], (torch.randn(EXAMPLES, 3, 32, 32), torch.randint(0, 10, (EXAMPLES,)))


class UNet(nn.Module):
    """Images [batch, 1, 32, 32] -> logits [batch, 10]; convolutions on three scales, twice, with long skips."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.down = nn.ModuleList(convolutions(a, b) for a, b in pairwise((1, *widths)))
        self.up = nn.ModuleList(convolutions(a + b, b) for a, b in pairwise(widths[::-1]))
        self.head = nn.Conv2d(widths[0], 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([skip, F.interpolate(x, scale_factor=2)], 1))
        return self.head(x).mean((2, 3))


def unet() -> Job:
    torch.manual_seed(0)
    model = UNet()
    images = torch.randn(EXAMPLES, 1, 32, 32), torch.randint(0, 10, (EXAMPLES,))
    return model, [*model.down, *model.up], images


JOBS: dict[str, Callable[[], Job]] = {
    "gpt": gpt,
    "gpt with checkpoints": partial(gpt, checkpointed=True),
    "gpt with selective checkpoints": partial(gpt, checkpointed=True, how=selective),
    "one example": partial(gpt, examples=1, length=1024),
    "vit": vit,
    "unet": unet,
}
CHECKPOINTED: dict[str, Callable[[], Job]] = {
    "one checkpointed example": partial(gpt, checkpointed=True, examples=1, length=512, layers=4),
    "one example in blocks with checkpoints": gpt_with_inner_checkpoints,
}
STEPS = {"gpt": 4, "gpt with selective checkpoints": 4, "vit": 4, "one example": 4}
"""that the first adaptation takes: half of the 16 examples are measured, in two quarters; or one in two halves"""


# -- bounds -----------------------------------------------------------------------------------------------------


def peaks(name: str) -> tuple[int, int, int, int]:
    """(of an untouched step, of the steps that adapt, of a compressed step after them, of the measurement)"""
    model, _, batch = {**JOBS, **CHECKPOINTED}[name]()
    loss_fn = loss_of(model)

    def untouched() -> None:
        loss_fn(batch).backward()
        model.zero_grad()

    untouched()
    before = peak_of(untouched)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=0))

    def compressed() -> None:
        with gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        model.zero_grad()

    measured: list[int] = []
    adapt = gact._schedule.adapt
    gact._schedule.adapt = lambda *args, **kwargs: measured.append(peak_of(partial(adapt, *args, **kwargs)))
    adapting = max(peak_of(compressed) for _ in range(STEPS.get(name, 1)))
    assert len(gact.history) == 1
    assert len(measured) == STEPS.get(name, 1)
    later = min(peak_of(compressed) for _ in range(2))
    assert len(gact.history) == 1
    gact.detach()
    return before, adapting, later, max(measured)


@pytest.mark.parametrize("name", JOBS)
def test_an_adapting_step_holds_five_times_the_largest_block_more(name, monkeypatch):
    monkeypatch.setattr(sections, "LEAST_BYTES", 1 << 16)  # for blocks as small as these
    model, blocks, batch = JOBS[name]()
    largest = max(exact_bytes_of_blocks(model, blocks, batch[0][:AT_ONCE]))
    untouched, adapting, later, measuring = peaks(name)
    assert later < untouched or name == "gpt with checkpoints"
    assert adapting <= later + 5 * largest
    assert adapting < untouched
    assert largest < measuring <= adapting


ACGC = {"policy": "acgc", "error": 0.1}
ACTNN = {"policy": "actnn", "bits": 3}
large = pytest.mark.large


@pytest.mark.parametrize(
    ("follows", "options"),
    [
        pytest.param(False, {"bits": 4}, id="step", marks=large),
        pytest.param(True, {"bits": 4}, id="follow", marks=large),
        pytest.param(False, ACGC, id="acgc-step", marks=large),
        pytest.param(True, ACGC, id="acgc-follow", marks=large),
        pytest.param(False, ACTNN, id="actnn-step", marks=large),
        pytest.param(True, ACTNN, id="actnn-follow"),
        pytest.param(False, {"retained_bytes": 1_250_000}, id="retained bytes", marks=large),
    ],
)
def test_so_it_does_whatever_adapts_it_and_when(follows, options, monkeypatch):
    """In its first adaptation and in a later one, and in all steps between them. A later one measures larger parts of
    so small a batch, as most of its time is Python's."""
    monkeypatch.setattr(sections, "LEAST_BYTES", 1 << 16)
    fractions = []

    def measured(*args: Any, fraction: float, **options: Any) -> Any:
        fractions.append(fraction)
        return one_pass.measure(*args, fraction=fraction, **options)

    monkeypatch.setattr(adapter, "measure", measured)
    model, blocks, batch = gpt(layers=6)
    loss_fn = loss_of(model)

    def untouched() -> None:
        loss_fn(batch).backward()
        model.zero_grad()

    untouched()
    before = peak_of(untouched)
    gact = gact_dist.attach(model, config=Config(min_numel=0, adapt_interval=6, adapt_tolerance=0.0, **options))
    if follows:
        gact.follow()

    def compressed() -> None:
        with nullcontext() if follows else gact.step(loss_fn, batch):
            loss = loss_fn(batch)
        loss.backward()
        model.zero_grad()

    found = []
    while len(gact.history) < 2:
        found.append(peak_of(compressed))
        assert len(found) < 40
    gact.detach()
    assert max(fractions) <= 0.5
    largest = max(exact_bytes_of_blocks(model, blocks, batch[0][: int(EXAMPLES * max(fractions))]))
    later = min(found[1:])
    assert later < max(found) <= later + 5 * largest
    assert max(found) < before


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_checkpointed_block_is_held_once_and_measured_in_sections(name, monkeypatch):
    """Beside what the job holds at its peak, one block among it: the block, and of its eighths the double backward of
    one, five times as much, with the tensors at their borders. Whole, or held once more, it takes 3.1 to 3.9 blocks."""
    monkeypatch.setattr(sections, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(differentiable_attention, "_LEAST_BLOCK", 1 << 14)
    model, blocks, batch = gpt(examples=1, length=512, layers=4)
    largest = max(exact_bytes_of_blocks(model, blocks, batch[0]))
    untouched, _, _, measuring = peaks(name)
    assert measuring < untouched + 2.5 * largest


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_the_graph_of_a_block_is_freed_when_its_visit_ends(name, monkeypatch):
    model, blocks, batch = JOBS[name]()
    replays: weakref.WeakSet[Replay] = weakref.WeakSet()
    alive: list[int] = []

    class Known(Replay):
        def __init__(self, *args: Any) -> None:
            alive.append(len(replays))
            super().__init__(*args)
            replays.add(self)

    monkeypatch.setattr(blocks_room, "Replay", Known)
    gact = gact_dist.attach(model, config=Config(bits=4, min_numel=0))
    with gact.step(loss_of(model), batch):
        loss_of(model)(batch)
    assert len(alive) >= 2 * len(blocks) - 1  # the last block's first walk may be the loss's own
    assert max(alive) <= 1  # the one before may go as the next begins
    assert not replays
    gact.detach()


def test_what_was_measured_is_let_go_before_the_walk_goes_on():
    """Of the largest saved tensor these are the tensor and its weights, beside which the next section is measured."""
    hooks = SavedTensorHooks(nn.Linear(2, 2), Config(bits=4), 0)
    alive: list[weakref.ref] = []

    def walked() -> Iterator[Measured]:
        for name in ("first", "second"):
            assert not any(storage() is not None for storage in alive)
            noted = Noted(name, torch.Size([64]), 32, Role.ACTIVATION)
            values = torch.randn(64)
            alive.append(weakref.ref(values.untyped_storage()))
            made = [Measured(noted, values, torch.ones(64), None)]
            del values
            yield made.pop()

    cut: Any = SimpleNamespace(groups=[])
    found = one_pass._ByWalk(hooks, nn.Linear(2, 2), 0, 1.0, 1)._noted(walked(), cut, one_pass._Found())
    hooks.close()
    assert list(found.by_name) == ["first", "second"]
