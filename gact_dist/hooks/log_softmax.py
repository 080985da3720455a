"""Which results of a log-softmax are stored by the chances of their words, in about 1.8 bits each.

[Note: log-softmax] The backward of log_softmax takes exp() of its result and nothing else, and those of nll_loss and
gather read only its shape. So where these alone have saved it, it is sampled (codec/sampled.py). Everything else that
reads it (an entropy, a backward of the backward) needs the logarithms themselves: then it is exact. It is exact as well
where no target is picked from it: the gradient at the logits is p less the targets, and with targets that are
probabilities themselves (a distillation) it may be far smaller than p, and than its error.

Its backward, and that of nll_loss, hold no second tensor of its size beside the gradient at the logits: see
[Note: streamed].
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._torch_internals import PLAIN, saves_own_result
from ..config import Config

_MAKER = "LogSoftmaxBackward0"
_PICKS_TARGETS = ("NllLossBackward0", "GatherBackward0")
_MOST_BITS = 4.0  # of a level: beside the errors of 8 bits those of sampling would count


class LogSoftmaxes:
    """What is known of the results of log_softmax, by name. See [Note: log-softmax]."""

    def __init__(self, config: Config) -> None:
        has_few_bits = config.bits is not None and config.bits <= _MOST_BITS
        compresses = has_few_bits or config.retained_bytes is not None
        self.may_sample = compresses and config.log_softmax == "sampled"
        """whether to sample a result that nothing else reads"""
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
