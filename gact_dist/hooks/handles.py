"""What the graph holds in place of a saved tensor: handles that give the tensor back.

[Note: lifetime] The graph owns a handle, a handle owns its payload, and the tables of a step know handles only weakly.
A graph that is dropped frees everything, with or without a backward; restore changes nothing, so retain_graph, a second
backward and a nested grad work.

[Note: several readers] Queries, keys and values are projections of one tensor, and attention that runs again reads what
its own backward reads next. Such backwards mostly follow one another, so what is decoded or made for one of several
readers is kept until the last of them has it, or until another tensor is decoded. So no more than one tensor is there
that nobody reads at the moment; of attention, its operands. Other recipes do not count as readers: they work in the
memory of what they have decoded, and to keep a copy of it would raise the peak of a step.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from .. import codec
from .._short_ways import IS_BUILT, native_base
from .._torch_internals import PLAIN_OR_PARAMETER, is_fake, negative_view, node_in_backward, once
from ..distributed import Layout, whole_part
from ..offload import HostOffload, Payload
from .one_bit import Limits
from .roles import Role
from .streamed import (
    LEAST_NUMEL,
    NODES,
    Decoded,
    Made,
    Order,
    Pieces,
    Streamed,
    may_stream,
    order_of,
    streamed,
    streaming_node,
    without_reading,
)

_CONJUGATED, _NEGATED = 1, 2


def lazy_bits(tensor: Tensor) -> int:
    """Whether a tensor's elements are the conjugates or the negatives of what is in memory. See [Note: lazy bits]."""
    return _CONJUGATED * tensor.is_conj() + _NEGATED * tensor.is_neg()


def _toggled(tensor: Tensor, bits: int) -> Tensor:
    """A view of a tensor with some of its lazy bits changed."""
    if bits & _CONJUGATED:
        tensor = tensor.conj()
    return negative_view(tensor) if bits & _NEGATED else tensor


class Recipe:
    """In place of a payload: what makes a tensor from others that are stored. See [Note: derived] in derived.py."""

    __slots__ = ("dtype", "expression", "nbytes", "shape", "sources", "strides", "work")

    def __init__(self, expression: Any, tensor: Tensor) -> None:
        """expression: gives the tensor's elements, in any shape and type."""
        self.expression = expression
        self.work: int = getattr(expression, "work", tensor.numel())
        """elements that are written to make it, see [Note: work] in expressions.py"""
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()
        self.nbytes: int = expression.nbytes
        self.sources = _sources_of(expression)
        """names of what it is made from"""

    def of(self, expression: Any) -> "Recipe":
        """The same with another expression, of others that are like those of its own."""
        made = Recipe.__new__(Recipe)
        made.expression, made.work, made.nbytes = expression, self.work, self.nbytes
        made.dtype, made.shape, made.strides, made.sources = self.dtype, self.shape, self.strides, self.sources
        return made

    @property
    def keeps_what_it_made(self) -> bool:
        """For its next reader."""
        return getattr(self.expression, "keeps_what_it_made", False)

    def pieces(self, order: Order) -> Pieces | None:
        """See Stored.pieces()."""
        find = getattr(self.expression, "pieces", None)
        found = None if find is None else find(order)
        if found is None:
            return None
        return Made(lambda _first, _last, made: made.to(self.dtype).view(-1), [found], 1)

    def make(self) -> Tensor:
        """The tensor, in memory of its own."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.make()
        made: Tensor = self.expression.restore()
        if made.dtype != self.dtype:
            made = made.to(self.dtype)
        if made.shape != self.shape:
            made = made.reshape(self.shape)
        if made.stride() == self.strides:
            return made
        laid_out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=made.device)
        place = once(laid_out)
        place.copy_(made[tuple(map(slice, place.shape))])
        return laid_out


Content = Tensor | codec.Packed | Recipe
"""an alias of a tensor, or what gives it back"""


def decoded(content: Content, gaps: bool = True) -> Tensor:
    """The tensor that it stands for, which an alias shares its memory with.

    gaps: whether what was rounded has the gaps between its elements that the tensor has in a larger one.
    """
    if isinstance(content, codec.Packed):
        return codec.unpack(content) if gaps or not content.is_rounded else codec.unpack_without_gaps(content)
    return content.make() if isinstance(content, Recipe) else content.detach()


def _sources_of(expression: Any) -> tuple[str, ...]:
    """The names of what an expression restores, in its order. What it keeps itself has none."""
    return tuple(dict.fromkeys(stored.name for stored in _restored_by(expression)))


def _restored_by(expression: Any) -> Iterator["Stored"]:
    """What an expression restores, in its order."""
    pending = [expression]
    while pending:
        base = stored_of(pending.pop())
        if isinstance(base, Stored):
            yield base
        else:
            pending += reversed(getattr(base, "operands", ()))


def is_made_from(recipe: Recipe, stored: "Stored") -> bool:
    """Whether a recipe restores a tensor, itself or in others that are made again."""
    seen: set[int] = set()
    pending = [recipe]
    while pending:
        for source in _restored_by(pending.pop().expression):
            if source is stored:
                return True
            if isinstance(source.payload, Recipe) and id(source) not in seen:
                seen.add(id(source))
                pending.append(source.payload)
    return False


def _pieces_of(content: Content, order: Order) -> Pieces | None:
    """See Stored.pieces()."""
    if isinstance(content, Recipe):
        return content.pieces(order)
    if isinstance(content, Tensor) or order_of(content.shape, content.strides) != order:
        return None
    granule = codec.part_unit(content)
    return Decoded(content, granule) if granule else None


def _streamed(content: codec.Packed | Recipe, node: str) -> Streamed | None:
    """See streamed()."""
    return streamed(content, node, partial(decoded, content, gaps=False), partial(_pieces_of, content))


_Handle: Any = native_base("Handle")
_Unpacker: Any = native_base("Unpacker")


class Stored(_Handle):
    """One tensor kept for backward: a codec's payload, on the device or in host memory, an alias, or a recipe."""

    __slots__ = () if IS_BUILT else (
        "__weakref__", "_left", "_made", "keeps_gaps", "name", "offloaded", "on_restore", "payload", "readers",
        "version", "witness",
    )  # fmt: skip

    def __init__(self, name: str, tensor: Tensor, payload: Content, offload: HostOffload | None = None) -> None:
        self.name, self._left = name, 0  # of the readers, those that have not read what is made
        self.readers = 1
        """operators that have saved it or a view of it, and attention that runs again"""
        self._made: tuple[Tensor, int | None, bool] | None = None  # that is kept for them, its version, if with gaps
        self.keeps_gaps = False
        """whether what is rounded comes back with the gaps that it has in a larger tensor, as compiled code expects"""
        self.on_restore: Callable[[Any], None] | None = None
        """told of every use, with this handle"""
        self.keep(payload, tensor, offload)

    def keep(self, payload: Content, tensor: Tensor, offload: HostOffload | None) -> None:
        """Keep this payload of a tensor, in place of what was kept before."""
        self.offloaded: Payload | None = None
        if offload is not None:
            payload = self._place(payload, offload)
        self.payload, self._made = payload, None
        self.witness = payload if isinstance(payload, Tensor) else version_witness(tensor)
        self.version = tensor._version

    def make_again(self, expression: Any) -> None:
        """Keep a recipe in place of a payload that is exact, on the device or on its way to the host."""
        payload = self.payload
        if isinstance(payload, Tensor):
            self.keep(Recipe(expression, payload), payload, None)
        elif isinstance(payload, codec.Packed):
            like = torch.empty_strided(payload.shape, payload.strides, dtype=payload.dtype, device="meta")
            self.payload, self.offloaded, self._made = Recipe(expression, like), None, None

    def _place(self, payload: Content, offload: HostOffload) -> Content:
        """What to keep of a payload beside what is offloaded of it."""
        if isinstance(payload, Recipe):
            return payload
        buffer = payload if isinstance(payload, Tensor) else payload.payload
        nbytes = codec.stored_bytes(buffer)
        if not offload.takes(buffer.device, nbytes):
            return payload
        self.offloaded = offload.place(self.name, nbytes)
        if not self.offloaded.leaves:
            return payload
        packed = codec.borrow(payload) if isinstance(payload, Tensor) else payload
        self.offloaded.send(packed.payload)
        return codec.without_payload(packed)

    @property
    def numel(self) -> int:
        return self.payload.shape.numel()

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since it was saved: to use it is an error."""
        return self.witness._version != self.version

    @property
    def host_bytes(self) -> int:
        """Bytes of the payload in host memory."""
        return self.offloaded.held.nbytes if self.offloaded is not None and self.offloaded.leaves else 0

    @property
    def is_exact(self) -> bool:
        """Whether restore() returns what was saved, bit for bit."""
        payload = self.payload
        return isinstance(payload, Tensor) or (
            isinstance(payload, codec.Packed) and payload.scheme is codec.Scheme.EXACT
        )

    @property
    def restores_private(self) -> bool:
        """Whether restore() returns memory that holds nothing else."""
        return not isinstance(self.payload, Tensor)

    def replace(self, tensor: Tensor) -> None:
        """Keep another tensor in place of an alias."""
        self.payload = self.witness = tensor
        self._made = None
        self.version = tensor._version

    def restore(self) -> Tensor:
        """The tensor, private to the caller unless it is an alias. What is rounded takes no memory for gaps that it has
        in a larger tensor, unless keeps_gaps is set. Raises RuntimeError if it was modified in place.
        """
        if self.on_restore is not None or self.witness._version != self.version:
            self._note_use()
        return self._restore(self.keeps_gaps)

    def unpack(self) -> Tensor:
        """The same for the operator whose backward runs, which may decode it as it goes on: see streamed.py. Recipes,
        which are made as a whole, use restore()."""
        node = None
        if self.payload.shape.numel() >= LEAST_NUMEL and self._made is None and not self.keeps_gaps:
            node = streaming_node(self.readers)
        if node is None:
            return self.restore()
        self._note_use()
        content = self._content()
        found = None if isinstance(content, Tensor) else self._streamed(content, node)
        return self._restore(self.keeps_gaps) if found is None else found

    def restore_memory(self) -> Tensor:
        """The same with its own strides, by which views find their place in it."""
        if self.on_restore is not None or self.witness._version != self.version:
            self._note_use()
        return self._restore(True)

    def pieces(self, order: Order) -> Pieces | None:
        """The tensor piece by piece, where its elements lie in an order; None where it can only be had as a whole."""
        self._note_use()
        return _pieces_of(self._content(), order)

    def gelu(self, approximate: str) -> Tensor | None:
        """GELU of the tensor, where a kernel computes it while it decodes; see codec.function_part()."""
        content = self.payload
        if self.readers > 1 or not isinstance(content, codec.Packed) or not codec.has_functions(content):
            return None
        self._note_use()
        content = cast(codec.Packed, self._content())  # perhaps from the host: offload changes no bit
        if _latest:
            self._forget_latest(get_ident())
        made = codec.function_part(content, approximate, 0, self.numel)
        return made.as_strided(content.shape, content.strides)

    def _note_use(self) -> None:
        if self.witness._version != self.version:
            _refuse_modified(f"saved tensor {self.name!r}", self.witness._version, self.version)
        if self.on_restore is not None:
            self.on_restore(self)

    def _streamed(self, content: codec.Packed | Recipe, node: str) -> Streamed | None:
        """For a node that reads as it goes on; None where the tensor has to be decoded first."""
        if isinstance(content, Recipe) and content.keeps_what_it_made:
            return None
        found = _streamed(content, node)
        if found is not None and _latest:
            self._forget_latest(get_ident())
        return found

    def _restore(self, gaps: bool) -> Tensor:
        payload = self.payload
        if isinstance(payload, Tensor) or (isinstance(payload, Recipe) and payload.keeps_what_it_made):
            return self._decoded(gaps)
        if self.readers > 1:
            return self._for_several(gaps)
        if _latest:
            self._forget_latest(get_ident())
        return self._decoded(gaps)

    def _for_several(self, gaps: bool) -> Tensor:
        """See [Note: several readers]."""
        made, version, has_gaps = self._made or (None, None, gaps)
        if made is None or _version_of(made) != version or has_gaps < gaps:  # a reader has written to it
            thread = get_ident()
            self._forget_latest(thread)
            made, has_gaps, self._left = self._decoded(gaps), gaps, self.readers
            self._forget_latest(thread)  # what it was made of
            _latest[thread] = [ref(self)]
        self._left -= 1
        self._made = (made, _version_of(made), has_gaps) if self._left > 0 else None
        return made.detach()

    def _decoded(self, gaps: bool) -> Tensor:
        return decoded(self.payload if self.offloaded is None else self._content(), gaps)

    def _content(self) -> Content:
        """The payload, on the device."""
        payload = self.payload
        if self.offloaded is not None:
            fetched = self.offloaded.fetch()
            if fetched is not None and isinstance(payload, codec.Packed):
                payload = codec.with_payload(payload, fetched)
        return payload

    def exchange(self, payload: Content) -> Content:
        """Keep another payload of the same tensor; the one before. Nobody gets what was made with that any more."""
        before, self.payload = self.payload, payload
        for thread in [*_latest]:
            self._forget_latest(thread)
        return before

    @staticmethod
    def _forget_latest(thread: int) -> None:
        """See [Note: several readers]."""
        for reference in _latest.pop(thread, ()):
            stored = reference()
            if stored is not None:
                stored._made = None


_latest: dict[int, list[ref[Stored]]] = {}
"""by thread, what was decoded last for several readers: each device has a thread that runs its backwards"""


def _version_of(tensor: Tensor) -> int | None:
    """None for one made under inference_mode(), where a backward may run."""
    return None if tensor.is_inference() else tensor._version


def restored_together(handles: Iterable[Any]) -> list[Tensor]:
    """What some handles stand for, kept as if it were one tensor. See [Note: several readers]."""
    thread = get_ident()
    found: list[Tensor] = []
    kept: list[ref[Stored]] = []
    for handle in handles:
        found.append(handle.restore())
        kept += _latest.pop(thread, ())
    _latest[thread] = kept
    return found


class Unpacking(_Unpacker):
    """The short way of the unpack hook: for what one reader decodes at once, and for what is kept as it is.

    The graph owns it, so it owns no more than the long way.
    """

    def __init__(self, restore: Callable[[Any], Tensor]) -> None:
        """restore: the long way."""
        self.restore, self.decode, self.grad_mode = restore, _decoded_alone, torch.is_grad_enabled
        self.handle_type, self.kept_type, self.packed_type, self.recipe_type = Stored, Kept, codec.Packed, Recipe
        self.made_for_several, self.large_numel = _latest, LEAST_NUMEL
        self.node_in_backward, self.streaming, self.stream = node_in_backward, NODES, _at_node


def _decoded_alone(content: codec.Packed | Recipe) -> Tensor:
    return decoded(content, gaps=False)


def _at_node(handle: Stored, node: str) -> Tensor:
    """What is unpacked for a node that streams, of one reader's, whose payload is on the device."""
    content = handle.payload
    found = None if isinstance(content, Tensor) or not may_stream() else handle._streamed(content, node)
    return handle._restore(gaps=False) if found is None else found


class Replaceable:
    """What the graph holds of a tensor that is being recorded: the tensor, or for a while another in its place."""

    __slots__ = (
        "__weakref__",
        "content",
        "is_block_input",
        "leaves_gaps",
        "limits",
        "name",
        "on_restore",
        "replacement",
    )

    def __init__(self, content: Tensor | codec.Packed, name: str = "", limits: Limits | None = None) -> None:
        """content: the tensor; packed where one bit of each element is all that is read of it. limits: on whose sides
        its elements stay where a step rounds it."""
        self.content = content.detach() if isinstance(content, Tensor) else content
        self.name, self.limits = name, limits
        self.is_block_input = False
        """whether a checkpoint makes its block again from it"""
        self.leaves_gaps = True
        """whether what is decoded has the gaps between its elements that the tensor has in a larger one"""
        self.replacement: Tensor | codec.Packed | None = None
        self.on_restore: Callable[[], None] | None = None
        """told of every use"""

    @property
    def tensor(self) -> Tensor:
        return codec.unpack(self.content) if isinstance(self.content, codec.Packed) else self.content

    @property
    def restores_private(self) -> bool:
        """See Stored.restores_private."""
        return self.replacement is not None or isinstance(self.content, codec.Packed)

    @property
    def shape(self) -> torch.Size:
        return self.content.shape

    @property
    def numel(self) -> int:
        return self.content.shape.numel()

    @property
    def element_bytes(self) -> int:
        return self.content.dtype.itemsize

    def replace(self, tensor: Tensor) -> None:
        """Hand out another tensor in its place."""
        self.replacement = tensor

    def restore(self) -> Tensor:
        if self.on_restore is not None:
            self.on_restore()
        packed = self.replacement
        if not isinstance(packed, codec.Packed):
            return self._restored()
        found = None
        if packed.scheme is codec.Scheme.SAMPLED and self.numel >= LEAST_NUMEL:
            node = streaming_node(1)
            found = None if node is None else _streamed(packed, node)
        return decoded(packed, gaps=self.leaves_gaps) if found is None else found

    def restore_memory(self) -> Tensor:
        """The same with its own strides, by which views find their place in it."""
        if self.on_restore is not None:
            self.on_restore()
        return self._restored()

    def _restored(self) -> Tensor:
        if isinstance(self.replacement, codec.Packed):
            return codec.unpack(self.replacement)
        return self.tensor.detach() if self.replacement is None else self.replacement.detach()


@dataclass(eq=False)
class Recorded:
    """A saved tensor seen while sensitivity is measured, with the graph edge that produced it.

    The graph holds only the handle: an operator that saves its own result would otherwise own its own node, a cycle
    that no collector sees, and with it the whole graph below.
    """

    name: str
    handle: Replaceable
    whole: Tensor | None
    """the tensor whose storage it views; None where it is packed, and views no other"""
    node: Any
    """autograd node that produced origin, or accumulates the gradient of a leaf; None without a graph"""
    output_number: int
    compressible: bool
    derived: bool = False
    """whether a step makes it from others: what it is made of moves it"""
    is_log_softmax: bool = False
    """whether a step may sample it; see log_softmax.py"""
    is_one_bit: bool = False
    """see Role.is_one_bit"""

    @property
    def role(self) -> Role:
        """As a step would store it."""
        if self.is_log_softmax:
            return Role.LOG_SOFTMAX
        return Role.ACTIVATION if self.compressible or self.derived else Role.STATISTIC

    @property
    def has_graph(self) -> bool:
        """Whether a backward reaches it; only rounding it anew shows what another one does."""
        return self.node is not None

    @property
    def limits(self) -> Limits | None:
        """See Replaceable."""
        return self.handle.limits

    @property
    def tensor(self) -> Tensor:
        """The saved tensor as it is, without a graph."""
        return self.handle.tensor

    @property
    def origin(self) -> Tensor:
        """The tensor whose storage it views; shape and strides of the edge's gradient."""
        return self.tensor if self.whole is None else self.whole

    @property
    def shape(self) -> torch.Size:
        return self.handle.shape

    @property
    def numel(self) -> int:
        return self.handle.numel

    @property
    def nbytes(self) -> int:
        """Of the tensor as it is."""
        return self.handle.numel * self.handle.element_bytes

    @property
    def itemsize_bits(self) -> int:
        return 8 * self.handle.element_bytes

    @property
    def replacement(self) -> Tensor | codec.Packed | None:
        """Handed out in the tensor's place while set."""
        return self.handle.replacement

    @replacement.setter
    def replacement(self, tensor: Tensor | codec.Packed | None) -> None:
        self.handle.replacement = tensor

    def store(self) -> None:
        """It turned out that it must not be derived."""
        self.derived, self.compressible = False, True

    def keep_exactly(self) -> None:
        """It turned out that it must not be rounded."""
        self.compressible = self.derived = self.is_log_softmax = False


class ReplayError(RuntimeError):
    """A block did not do the same when it ran again, or cannot run again."""


@dataclass(eq=False)
class Noted:
    """A tensor that a block saved in a run that only showed what it saves: the graph holds none of its memory."""

    name: str
    shape: torch.Size
    itemsize_bits: int
    role: Role | None
    """None where it makes no difference: of a small tensor, or one of integers"""
    derived: bool = False
    """see Recorded"""
    limits: Limits | None = None
    """see Replaceable"""
    is_block_input: bool = False
    """see Replaceable"""
    recomputes: bool = False
    """whether others of its block are computed from it once more, as it is stored"""
    has_graph: bool = True
    """as in Recorded"""
    keeps_gaps: bool = False
    """see Stored"""

    @property
    def compressible(self) -> bool:
        return self.role is Role.ACTIVATION and not self.derived

    @property
    def is_log_softmax(self) -> bool:
        """See Recorded."""
        return self.role is Role.LOG_SOFTMAX

    @property
    def is_one_bit(self) -> bool:
        """See Recorded."""
        return self.role is not None and self.role.is_one_bit

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """See Recorded."""
        return self.numel * self.itemsize_bits // 8

    def store(self) -> None:
        """See Recorded."""
        self.derived = False

    def keep_exactly(self) -> None:
        """It turned out that it must not be rounded."""
        self.role = Role.STATISTIC

    def restore(self) -> Tensor:
        raise ReplayError(f"a backward reached {self.name!r} in a block that had run only to be noted")


class View:
    """A saved tensor inside the memory of one that is already stored."""

    __slots__ = ("__weakref__", "base", "offset", "size", "stride", "toggled")

    def __init__(self, base: Stored | Replaceable | Noted, tensor: Tensor, offset: int, toggled: int = 0) -> None:
        """toggled: the lazy bits in which the tensor differs from its base."""
        self.base, self.size, self.stride, self.offset = base, tensor.size(), tensor.stride(), offset
        self.toggled = toggled

    def restore(self) -> Tensor:
        base = self.base
        like = base.witness if isinstance(base, Stored) else base.content if isinstance(base, Replaceable) else None
        unread = without_reading(self.size, self.stride, like, self._restore) if isinstance(like, Tensor) else None
        if unread is None:
            return self._restore()
        if isinstance(base, Stored):
            base._note_use()
        return unread

    def _restore(self) -> Tensor:
        base = self.base
        return self.within(base.restore() if isinstance(base, Noted) else base.restore_memory())

    def behind(self, tensor: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
        """The tensor of which this is a view, in the memory that it shares with the one that the view stands for."""
        whole = tensor.detach().as_strided(shape, strides, int(tensor.storage_offset()) - self.offset)
        return _toggled(whole, self.toggled) if self.toggled else whole

    def within(self, base: Tensor) -> Tensor:
        """The part of a restored base that is this view."""
        part = base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)
        return _toggled(part, self.toggled) if self.toggled else part


class Distributed:
    """A saved DTensor: a handle on this rank's part, and the function that makes a DTensor of it again."""

    __slots__ = ("layout", "local", "make")

    def __init__(self, local: Any, make: Callable[[Tensor], Tensor], layout: Layout | None = None) -> None:
        """layout: of a DTensor; None for another subclass of Tensor."""
        self.local, self.make, self.layout = local, make, layout

    def restore(self) -> Tensor:
        local = self.local  # with its own strides, which those of the whole follow from
        return self.make(local.restore_memory() if isinstance(local, Stored) else local.restore())


def base_of(handle: Any) -> Any:
    """What a view is a part of; any other handle is what it stands for itself."""
    return handle.base if isinstance(handle, View) else handle


def count_reader(base: Any) -> None:
    """Another one, of what base_of() gave. See [Note: several readers]."""
    if isinstance(base, Stored):
        base.readers += 1


def stored_of(handle: Any) -> Any:
    """The same, of a distributed tensor on this rank's part."""
    return base_of(handle.local if isinstance(handle, Distributed) else handle)


_Kept: Any = native_base("Kept")


class Kept(_Kept):
    """A parameter, a tensor computed from parameters, or a kind of tensor that no codec knows.

    The hooks turn off autograd's own check of versions, so it is made here. Sharding swaps a parameter's data, which
    leaves its version as it is; and a parameter that an optimizer updates within the backward has been used by then.
    """

    __slots__ = () if IS_BUILT else ("is_buffer", "of_model", "tensor", "vector", "version")
    tensor: Tensor

    def __init__(self, tensor: Tensor, of_model: bool = False, copies: bool = False, is_buffer: bool = False) -> None:
        """of_model: whether it is a parameter or a buffer, or made from parameters alone. copies: whether to copy it if
        it is a vector, perhaps with dimensions of size 1, for recipes: sharding may have taken the parameter away
        before one is made. is_buffer: whether it is a buffer or a part of one, which no job shards."""
        self.vector: Tensor | None = None
        if copies and tensor.numel() == max(tensor.shape, default=1):
            whole = tensor if type(tensor) in PLAIN_OR_PARAMETER else whole_part(tensor)
            if type(whole) in PLAIN_OR_PARAMETER:
                self.vector = cast(Tensor, whole).detach().clone()
        self.of_model, self.is_buffer = of_model, is_buffer
        # A Parameter object is kept itself (sharding swaps its data); of anything else an alias is kept, because a
        # saved output that is its own handle would be a reference cycle that the collector cannot see.
        kind = type(tensor)  # isinstance() of a parameter's class runs Python of torch's
        is_parameter = kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))
        self.tensor = tensor if is_parameter else tensor.detach()
        self.version = tensor._version

    def restore(self) -> Tensor:
        """The tensor. Raises RuntimeError if it was modified in place."""
        if self.tensor._version != self.version:
            what = f"[{self.tensor.type()} {list(self.tensor.shape)}]"
            _refuse_modified(what, self.tensor._version, self.version)
        return self.tensor


def _refuse_modified(what: str, version: int, expected: int) -> None:
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {version}; expected version {expected} instead. Use the out-of-place form of that "
        "operation, or clone the tensor before modifying it; an optimizer steps after backward"
    )


_EMPTY: dict[tuple[torch.dtype, torch.device, bool], Tensor] = {}


def version_witness(tensor: Tensor) -> Tensor:
    """An empty tensor that shares a tensor's version counter but not its memory.

    It lets unpack see that the original was modified in place after all of the original's memory has been freed.
    """
    witness = tensor.detach()
    witness.data = empty_like(tensor)
    return witness


def empty_like(tensor: Tensor) -> Tensor:
    """A tensor without elements of another's type and device: the same one every time."""
    key = (tensor.dtype, tensor.device, is_fake(tensor))
    empty = _EMPTY.get(key)
    if empty is None:
        empty = _EMPTY[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty
