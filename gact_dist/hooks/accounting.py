"""What a step keeps of each saved tensor, and what the untouched job would keep."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .. import codec
from .aliases import Memory
from .footprint import Footprint
from .handles import SavedTensorRow


class Ledger:
    """The account of one step of one rank."""

    def __init__(self) -> None:
        self.rows: list[SavedTensorRow] = []
        self.exact_bytes = 0
        """what the untouched job would keep"""
        self._footprint: Footprint | None = None

    def begin(self) -> None:
        """Start empty."""
        self.rows = []
        self.exact_bytes = 0

    @contextmanager
    def set_aside(self, footprint: Footprint | None = None) -> Iterator[None]:
        """Account for something that is no step of the job: the last step's account is there again afterwards.

        footprint: to be told of all that is kept meanwhile.
        """
        report = self.rows, self.exact_bytes
        self._footprint = footprint
        try:
            yield
        finally:
            self._footprint = None
            self.rows, self.exact_bytes = report

    def add(
        self, tensor: Tensor, name: str, memory: Memory, payload: Tensor | codec.Packed, host_bytes: int = 0
    ) -> None:
        """Note what is kept of a saved tensor; an alias of it, or a codec's payload. host_bytes: of it, on the host."""
        # The untouched job keeps the whole storage of a view alive; but the memory behind a view that has no graph is
        # the user's own (a slice of a data set), and only the view is counted.
        whole = tensor.untyped_storage().nbytes()
        own = tensor.numel() * tensor.element_size()
        seen = whole if tensor.grad_fn is not None else min(whole, memory.seen_bytes + own)
        new_bytes = max(0, seen - memory.seen_bytes)
        memory.seen_bytes += new_bytes
        self.exact_bytes += new_bytes
        bits = 8.0 * tensor.element_size()
        if isinstance(payload, Tensor) and host_bytes:
            kind, retained = "exact", host_bytes
        elif isinstance(payload, Tensor):
            kind = "exact"
            if tensor.grad_fn is not None:
                retained = 0 if memory.aliased else memory.seen_bytes
            else:  # what was seen before may have been encoded
                retained = new_bytes if memory.aliased else min(whole, own)
            memory.aliased = True
        else:
            kind, retained, bits = payload.scheme.name.lower(), payload.nbytes, payload.average_bits
        one_width = 0 if isinstance(payload, Tensor) else payload.one_width_bytes
        shape, dtype = tuple(tensor.shape), tensor.dtype
        self.rows.append(SavedTensorRow(name, shape, dtype, kind, bits, retained, host_bytes, one_width))
        if self._footprint is not None:
            self._footprint.add(name, tensor, payload, retained)
