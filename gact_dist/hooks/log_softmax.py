"""Which results of a log-softmax are stored by the chances of their words, in about 1.8 bits each.

[Note: log-softmax] The backward of log_softmax takes exp() of its result and nothing else, and those of nll_loss and
gather read only its shape. So where these alone have saved it, it is sampled (codec/sampled.py). Everything else that
reads it (an entropy, a backward of the backward) needs the logarithms themselves: then it is exact. It is exact as well
where no target is picked from it: the gradient at the logits is p less the targets, and with targets that are
probabilities themselves (a distillation) it may be far smaller than p, and than its error.

Whether it pays depends on what comes next. The backward of log_softmax holds its result, the gradient of that and its
own result, three tensors of one size, however it was stored. A loss whose backward is the next thing to happen has its
peak there; storing it in fewer bits takes time and gains nothing. Where other tensors are saved before its backward
begins (another head, another micro-batch, another stage's turn in a pipeline) it waits beside them, and the peak is
when theirs are there too. These take, with their gradients and what is decoded of them, about three times their own
size. So with "auto" a log-softmax is sampled once a forward or a backward has shown that tensors of half its size and
more were saved after it and before it was read. A rank finds that out alone: payloads are its own, no plan holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .. import _fields
from .._torch_internals import PLAIN, saves_own_result
from ..config import Config
from .accounting import Account
from .handles import Stored

_MAKER = "LogSoftmaxBackward0"
_PICKS_TARGETS = ("NllLossBackward0", "GatherBackward0")
_WORTHWHILE = 0.5  # of its own bytes, see [Note: log-softmax]
_MOST_BITS = 4.0  # of a level: beside the errors of 8 bits those of sampling would count


class LogSoftmaxes:
    """What is known of the results of log_softmax, by name. See [Note: log-softmax]."""

    def __init__(self, config: Config) -> None:
        self._mode = config.log_softmax
        has_few_bits = config.bits is not None and config.bits <= _MOST_BITS
        compresses = has_few_bits or config.retained_bytes is not None
        self.may_sample = compresses and config.log_softmax in ("auto", "sampled")
        self.waits: set[str] = set()
        """those after which much is saved before they are read"""
        self._rehearsed: list[FirstRead] | None = None  # what was saved in a rehearsal
        self._names: set[str] = set()

    def is_one(self, name: str) -> bool:
        """Whether a name is that of a result which log_softmax itself has saved."""
        return name in self._names

    def meets(self, tensor: Tensor, name: str) -> bool:
        """Whether log_softmax is saving its own result, over words that lie in a row of memory."""
        node: Any = tensor.grad_fn
        if not self.may_sample or node is None or node.name() != _MAKER:
            return False
        if type(tensor) not in PLAIN or not tensor.dim():
            return False
        dim = node._saved_dim - 2**64 if node._saved_dim >= 2**63 else node._saved_dim
        if dim % tensor.dim() != tensor.dim() - 1 or not saves_own_result(node):
            return False
        self._names.add(name)
        return True

    def allows(self, node: Any) -> bool:
        """Whether the backward of a node reads nothing but probabilities, or nothing."""
        return node.name() == _MAKER or node.name() in _PICKS_TARGETS

    def samples(self, name: str) -> bool:
        """Whether to sample a result that nothing else reads."""
        return self.may_sample and (self._mode == "sampled" or name in self.waits)

    def watch(self, stored: Stored, nbytes: int, account: Account, is_held: bool) -> None:
        """Find out what is saved from now on until a result is read. nbytes: its own, which are not yet in the account
        where it is held."""
        if self._mode != "auto":
            return
        before = account.untouched_bytes + (nbytes if is_held else 0)
        watching = FirstRead(self.waits, stored, nbytes, account, before)
        stored.on_restore = watching
        if self._rehearsed is not None:
            self._rehearsed.append(watching)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """A forward that may have no backward: its end counts as one."""
        self._rehearsed = []
        try:
            yield
            for watching in self._rehearsed:
                watching.settle()
        finally:
            self._rehearsed = None

    def state_dict(self) -> list[str]:
        """What was learnt, in plain values."""
        return sorted(self.waits)

    @staticmethod
    def parse_state(state: Mapping[str, Any]) -> set[str]:
        """What load_state() takes. Raises StateError."""
        return set(_fields.read(state, "log_softmax_waits", _fields.sequence(_fields.text), []))

    def load_state(self, waits: set[str]) -> None:
        """Go on with what parse_state() returned."""
        self.waits.clear()
        self.waits.update(waits)


class FirstRead:
    """Told when a result is read: learns whether it has waited."""

    def __init__(self, waits: set[str], stored: Stored, nbytes: int, account: Account, before: int) -> None:
        """before: bytes in the account when it was saved."""
        self._waits, self._name, self._own = waits, stored.name, nbytes
        self._account: Account | None = account
        self._before = before
        self._then: Callable[[Any], None] | None = stored.on_restore

    def __call__(self, stored: Stored) -> None:
        self.settle()
        if self._then is not None:
            self._then(stored)

    def settle(self) -> None:
        """It is read, or a forward is over."""
        account, self._account = self._account, None
        if account is not None and account.untouched_bytes - self._before >= _WORTHWHILE * self._own:
            self._waits.add(self._name)
