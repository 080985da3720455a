"""What compiled regions save, measured block by block beside the model as it was before torch.compile.

[Note: compiled blocks] Where each region lies within a block, the model as it runs can be cut at the same blocks as the
model without the compiler. A forward of either shows, block by block, which of their saved tensors have the same values
([Note: matching] in compiled_match.py). These are measured in the walk without the compiler. When that walk visits a
block it knows all that a perturbation takes: the block's inputs and their tangents, and the gradients at its outputs.
So what is left is rounded anew there, each in a run of the compiled block and its backward, and no more than one
block's parameters and gradients are there at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .. import codec
from .._torch_internals import has_compiled_parts
from ..distributed import any_rank
from ..hooks import Noted, Recorded, Replaceable, ReplayError, SavedTensorHooks, edge_to, origin
from .blocks import Between, BlockForward, Visit
from .compiled_match import EagerTensor, EagerTensors, Saved, seen
from .inner_backward import run_alone_in_blocks
from .measuring_mode import MeasuringMode, NoMode
from .parts import Part, present
from .perturbation import from_change, own_bits, rounding_of, widest_inexact
from .walk import Distance

_Forward = TypeVar("_Forward", bound=BlockForward)


class Result(NamedTuple):
    """What is known of a tensor that the model saves as it runs."""

    saved: Saved
    elsewhere: str | None
    """its name where nothing is compiled, if it is measured there"""
    perturbed: Tensor | None
    """see from_change; None for one that is measured there, or of a block on which the loss does not depend"""


class _EagerForward(BlockForward):
    """A forward without the compiler, which keeps of what is saved no more than a match takes."""

    _matches_values = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tensors = EagerTensors()
        self._of_block: list[EagerTensor] = []

    def _see(self, noted: Noted, tensor: Tensor) -> None:
        self._of_block.append(EagerTensor.of(noted, tensor, edge_to(origin(tensor))[0]))

    def _leave_block(self) -> None:
        self.tensors.add(self._of_block)
        self._of_block = []

    def _number(self) -> None:
        super()._number()
        outside = [record for record in self.found if isinstance(record, Recorded)]
        self.tensors.add([EagerTensor.of(record, record.tensor, record.node) for record in outside])


class _CompiledForward(BlockForward):
    """The same of a forward as it runs."""

    _matches_values = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: dict[Recorded | Noted, Saved] = {}

    def _see(self, noted: Noted, tensor: Tensor) -> None:
        self.seen[noted] = seen(noted, tensor, self._hooks.encoder)

    def _number(self) -> None:
        super()._number()
        for record in self.found:
            if isinstance(record, Recorded):
                self.seen[record] = seen(record, record.tensor, self._hooks.encoder)

    def forget(self) -> None:
        """Keep no more than what blocks have saved, by name and form."""
        self.found, self.between, self.seen = [], [], {}
        self.numbers = {key: number for key, number in self.numbers.items() if isinstance(key, Noted)}
        self.firsts = {key: record for key, record in self.firsts.items() if isinstance(key, Noted)}
        self.last = Between([], [], [], [])
        for visit in self.visits:
            visit.release_inputs()
            visit.before = None


class CompiledBlocks:
    """What the compiled regions of a model save. See [Note: compiled blocks]."""

    def __init__(
        self,
        hooks: SavedTensorHooks,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        forward: Callable[[], Any],
        fraction: float,
        *,
        matches: bool,
        boundary_bits: int | None,
        seed: int,
    ) -> None:
        """blocks: in which the regions lie. forward, fraction: as for one_pass.measure. matches: whether what the model
        without the compiler saves as well is measured there; otherwise all is perturbed.

        Runs the forward three times: without the compiler, where it shows which checkpointed blocks take discrete
        decisions, and twice as it is, for the roles of what a region saves are known once it has been seen.
        Raises CutError, ReplayError, InnerBackwardError.
        """
        self._hooks, self._seed = hooks, seed
        self._perturbed: dict[str, Tensor] = {}
        self._probed: dict[Any, tuple[Tensor, int]] = {}  # of the current block: (see rounding_of, width)
        self._runs: dict[Visit, Visit] = {}

        @contextmanager
        def running(kind: type[_Forward], mode: MeasuringMode) -> Iterator[_Forward]:
            cut = kind(hooks, model, blocks, mode, boundary_bits=boundary_bits, seed=seed)
            with run_alone_in_blocks(cut, model, blocks, forward, fraction):
                yield cut

        mode = MeasuringMode(differentiable=False)
        with torch.compiler.set_stance("force_eager"), running(_EagerForward, mode) as eager:
            tensors = eager.tensors
        for _ in range(2):
            with running(_CompiledForward, NoMode()) as self._forward:
                known = self._forward.seen  # all but results that a selective checkpoint keeps
                self._saved = [known[record] for record in self._forward.found if record in known]
                self._inside = {noted.name for visit in self._forward.visits for noted in visit.own}
                # without the compiler a block derives others, or under other names: sources would count too little
                hooks.store(self._derived_beside_regions())
                self._forward.forget()
        self._partners = self._agreed(tensors.partners(self._saved)) if matches else {}

    def _agreed(self, partners: Mapping[str, str]) -> dict[str, str]:
        """Those of all ranks that split parameters (tensor parallelism): what is left runs blocks, and their
        collectives, so it must be the same on each of these ranks, which hold other parts and may find others."""
        names = [item.name for item in self._saved]
        missed = any_rank([name not in partners for name in names], self._forward.groups)
        return {name: partners[name] for name, is_missed in zip(names, missed, strict=True) if not is_missed}

    def _derived_beside_regions(self) -> list[str]:
        """Names of what is derived in blocks that have regions."""
        visits = [visit for visit in self._forward.visits if any(map(has_compiled_parts, visit.modules))]
        return [noted.name for visit in visits for noted in visit.own if noted.derived]

    def begin(self, cut: BlockForward) -> None:
        """A walk begins. cut: a forward without the compiler. Raises ReplayError if it has other blocks."""
        ours = [(visit.modules, visit.shapes) for visit in self._forward.visits]
        if ours != [(visit.modules, visit.shapes) for visit in cut.visits]:
            raise ReplayError("without the compiler the model runs other blocks")
        self._runs = dict(zip(cut.visits, self._forward.visits, strict=True))

    def results(self) -> Iterator[Result]:
        """What is known of each compressible tensor after the walk, in the order of saving."""
        for item in self._saved:
            if item.compressible:
                # what is saved outside of blocks has the same name in either, for there nothing is compiled
                elsewhere = self._partners.get(item.name, None if item.name in self._inside else item.name)
                yield Result(item, elsewhere, self._perturbed.get(item.name))

    @property
    def columns(self) -> Mapping[str, int]:
        """By which those are grouped that are measured without the compiler, by their names there."""
        columns = {item.name: item.columns for item in self._saved}
        return {partner: columns[name] for name, partner in self._partners.items()}

    def perturb(self, visit: Visit, gradients: Sequence[Tensor | None], distance: Distance) -> None:
        """Measure by perturbation what is left of a block. Raises CutError if it runs otherwise than it did.

        visit: its run without the compiler. gradients: at its exits.
        """
        own = self._runs[visit]
        wanted = [n for n in self._forward.numbers if n in own.own and n.name not in self._partners]
        if not wanted:
            return
        own.inputs, own.arguments, own.surroundings = visit.inputs, visit.arguments, visit.surroundings
        with torch.compiler.set_stance("default"):
            before = self._gradients(own, gradients, wanted, None)
            for noted in wanted:
                moved = self._gradients(own, gradients, wanted, noted)
                self._perturbed[noted.name] = from_change(distance(moved, before), *self._probed[noted])
        own.release_inputs()
        self._probed = {}

    def _gradients(
        self, visit: Visit, gradients: Sequence[Tensor | None], wanted: Sequence[Noted], moved: Noted | None
    ) -> list[Tensor | None]:
        """Of a block's inputs and parameters, all it saves being rounded. moved: what is rounded in another way."""

        def keep(tensor: Tensor, first: Any, _: Tensor) -> Replaceable:
            number = self._forward.numbers.get(first)
            if number is None:
                return Replaceable(tensor)
            bits: Any = self._hooks.plan.bits_of(first.name)
            if first in wanted:
                bits = self._bits_of(first, tensor)
                number += len(self._forward.numbers) * (first is moved)
            if bits is None:
                return Replaceable(tensor)
            with torch.no_grad():
                packed = self._hooks.encoder.pack(tensor.detach(), bits, self._seed + number, first.limits)
                return Replaceable(codec.unpack(packed))

        part, replay, _ = self._forward.part_of(visit, keep)
        heads, entering = present(part.heads, gradients)
        if replay is not None:
            replay.forget()
        # a compiled backward runs once, for it overwrites what it was given
        return Part(heads, part.tails, part.leaves, ()).gradients(entering, retain_graph=bool(visit.outer))

    def _bits_of(self, noted: Noted, tensor: Tensor) -> int:
        """The width at which a tensor is perturbed."""
        if noted not in self._probed:
            rounding = rounding_of(tensor, None, self._hooks.encoder)
            self._probed[noted] = rounding, widest_inexact(own_bits(self._hooks.plan, noted.name), rounding)
        return self._probed[noted][1]
