"""The lines that are logged as a job goes on: at attach, after the first step, and after each adaptation."""

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from .. import codec, distributed
from ..adaptation import Adaptation
from ..config import Config
from ..hooks import SavedTensorHooks
from ..policies import Plan

_log = logging.getLogger(__name__)
_LARGE = 0.2
"""of all that is kept"""
_SAMPLED = 'Config.log_softmax="sampled" stores it in 1.8 bits a word where bits are at most 4, and '


class Progress:
    """Logs, on the first of the ranks that share a plan, what was attached and what each new plan keeps of a step."""

    def __init__(self, model: nn.Module, config: Config, groups: Sequence[Any], compresses: bool) -> None:
        """compresses: whether the policy does anything."""
        self._is_first = distributed.is_first(groups)
        self._news: str | None = ""
        self._said = False  # what the loss keeps
        has_other_setting = compresses and config.log_softmax != "sampled"
        self._remedy = _SAMPLED if has_other_setting else ""
        if self._is_first:
            name, ranks = type(distributed.unwrap(model)).__name__, math.prod(map(distributed.world_size, groups))
            what = _settings(config) if compresses else "nothing is compressed"
            _log.info("attached to %s: %s%s", name, what, f", one plan for {ranks} ranks" if ranks > 1 else "")

    def adapted(self, adaptation: Adaptation, plan: Plan) -> None:
        """A plan was made, or kept. It is logged with what the next step keeps under it."""
        if not adaptation.sensitivity:
            found = len(adaptation.stored_exactly)
            self._news = f"{found} tensors stored exactly" if found else "no sensitivity was measured, the plan is kept"
            return
        widths = [bits for bits in plan.bits.values() if isinstance(bits, int)]
        spread = f" ({min(widths)} to {max(widths)})" if widths else ""
        what = "plan kept" if adaptation.kept else "new plan"
        self._news = f"{what}, {adaptation.average_bits:.2f} bits on average{spread} for {len(adaptation.plan)} tensors"

    def after_forward(self, step: int, hooks: SavedTensorHooks | None) -> None:
        """A step's forward is over."""
        if self._news is None or hooks is None:
            return
        news, self._news = self._news, None
        exact, retained = hooks.account.exact_bytes, hooks.account.retained_bytes
        if self._is_first and retained:
            _log.info(
                "step %d: %s%.2f MiB kept for backward in place of %.2f MiB, ratio %.2f",
                step, news and f"{news}; ", retained / 2**20, exact / 2**20, exact / retained,
            )  # fmt: skip
            self._say_what_the_loss_keeps(hooks.account.log_softmax_bytes, retained)

    def _say_what_the_loss_keeps(self, nbytes: int, retained: int) -> None:
        if nbytes > _LARGE * retained and not self._said:
            self._said = True
            _log.info(
                "%.2f MiB of these are the log-softmax of a cross entropy, which is stored exactly; %sa chunked loss "
                "does not keep it (docs/memory.md, A large vocabulary)",
                nbytes / 2**20,
                self._remedy,
            )


def _settings(config: Config) -> str:
    """Those that say how much is kept, before a forward has shown of what."""
    gain = 32.0 / (config.bits + codec.metadata_bits(config.group_size)) if config.bits else 0.0
    amounts = {
        f"{{:g}} bits (float32 that is rounded takes {gain:.1f} times less)": config.bits,
        "{} bytes": config.retained_bytes,
        "error {:g}": config.error,
    }
    given = [text.format(value) for text, value in amounts.items() if value is not None]
    return ", ".join([f"policy {config.policy}", *given])
