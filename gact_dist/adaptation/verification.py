"""Whether the gradient under a plan is near the exact one, and if it is not, which tensors have to be stored exactly.

[Note: faults] The ranks compare the gradient under a plan with the exact one, each on the first quarter of its own
batch (see [Note: comparison] in sensitivity/comparison.py). It is a fault of the plan if

* on any rank the rounded gradient is not finite, and the exact one is;
* the mean error over the ranks is more than Config.noise_limit times what the sensitivities predict, and more than a
  thousandth of the squared gradient. A mean loss over n of N examples has N/n times the variance of all of them. The
  prediction of an adaptation is used until the next one, and grows with the squared gradient;
  The examples that are compared may move the gradient far more than those that were measured: a classifier has learnt
  most of them, and of the rest comes all of the gradient. How much more is seen with 8 bits for all tensors, as that
  grows both errors alike, and so much more is allowed; but not where 8 bits add more than a thousandth of the squared
  gradient, which tells of a backward that cannot bear rounding;
* it is more than the squared gradient, and at 8 bits for all tensors still is; or it is a thousand times as much. Where
  few bits add more noise than there is gradient, that may be due to the width, and is a warning. 8 bits add 1e-6 to
  2e-4 of it to a model that can be rounded at all, and the most that was met of a job that still learns is 160 times,
  at 2 bits (benchmarks/results/fidelity.md).

A few examples can show a fault that the batch has not: the gradient through a batch norm of two examples is all but
zero. So a fault is one only if all examples that there are show it too, and these are then searched with.

One rounding is enough to tell. Over seeds, levels and steps of small models its error was
0.7 to 1.7 times what was predicted, in the jobs of fidelity.md it is 0.01 to 2 times, and 11 times for a transformer at
uniform 2 bits (benchmarks/results/README.md); a backward that cannot bear rounding has thousands.

At 2 bits a fresh prediction was met by 17 times as much in a small GPT after 256 steps, where the plan before it had
4,200 times its own: what that was made from no longer held of the attention. So where bits adapt, a plan in use that
has become faulty causes an adaptation, whose plan is verified in turn.

[Note: search] Let the tensors be in the order of what they are predicted to add. The shortest beginning of this order
that has to be stored exactly for the fault to vanish is found by halves. Its last tensor is a culprit; if storing it
alone does not do, the search goes on before it. Tensors go together that the same line of the same kind of module makes
or reads, in modules whose paths differ only in numbers: what cannot be rounded in one layer cannot in the next.

It ends after so many comparisons that jobs with steps of seconds never meet the bound in minutes, which depends on the
machine's load: two runs of one job are to store the same tensors exactly. What is still suspected then is stored
exactly.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _fields, distributed
from ..hooks import SavedTensorHooks
from ..policies import WIDTHS, Plan
from ..sensitivity import Comparison, ProbeBatch, ProbePart, compared
from .attempts import Ending, attempt

_log = logging.getLogger(__name__)
# Plans that one search may try: enough to find four kinds of tensors among a hundred.
_MOST_TRIES = 32
_MOST_SECONDS = 300.0  # after which it tries no further plan
# An error below this part of the squared gradient, less than 4 bits add, is none that a job would notice, whatever was
# predicted. A VAE whose outputs saturated had 0.002, a thousand times its prediction, four steps before it had 1e6.
_NEGLIGIBLE = 0.001
_HOPELESS = 1000.0  # times the squared gradient
_PARTS, _MOST_PARTS = 4, 64  # into which a batch is cut, the first of which is compared
_SHOWN = 8  # names in a message
_GRADIENT = "gradient"
_DOES_NOT_FIT = (
    "with rounding %s, and to store exactly what is to blame (%s) would take more than retained_bytes: it stays "
    "rounded. Give more bytes, or a smaller batch, or watch the loss"
)
_CANNOT_COMPARE = "the gradient cannot be compared with the exact one on this rank: %s"


@dataclass(frozen=True, slots=True)
class _Seen:
    """What all ranks saw in one comparison, the same on every rank."""

    compared: bool
    """whether any rank could compare, and had a finite gradient"""
    overflowed: bool
    """whether any rank's exact gradient was not finite"""
    finite: bool
    """whether no rank's gradient became infinite or NaN by rounding"""
    error: float
    square: float
    """means over the ranks"""
    parts: float
    """mean over the ranks of N/n, of how many examples one was compared"""


_Compare = Callable[[Plan], _Seen]


class Verdict(NamedTuple):
    """The outcome of a verification, the same on every rank."""

    judged: bool
    """whether the exact gradient was finite, so that it could be compared with"""
    found: dict[str, str]
    """the tensors that have to be stored exactly from now on, each with the reason"""
    fault: str | None = None
    """what is wrong with the plan, where nothing was searched for, or too much found"""
    refutes: bool = False
    """whether what was predicted, more than the gradient itself, is refuted: where one tensor that must not be rounded
    was, as the sensitivities were measured, all others follow from what that did"""


class LearntByVerifying(NamedTuple):
    """What a state holds of a Verifier."""

    exact: dict[str, str]
    at: int | None
    predicted: float | None
    square: float
    predicted_at_8_bits: float | None


class Verifier:
    """Verifies the plans of one model. All its decisions follow from numbers reduced over the ranks."""

    def __init__(self, model: nn.Module, hooks: SavedTensorHooks, groups: Sequence[Any]) -> None:
        """groups: over which ranks share one plan, to reduce over one after the other."""
        self._model, self._hooks, self._groups = model, hooks, groups
        self._is_first = distributed.is_first(groups)  # and so says what all have agreed on
        self._limit = hooks.config.noise_limit
        self.exact: dict[str, str] = {}
        """the tensors that were found so far, each with the reason"""
        self.at: int | None = None
        """the step of the last verification"""
        self.latest: dict[str, float] | None = None
        """the squared errors of the gradient in the last comparison, and its square; for a log"""
        self._predicted: float | None = None  # variance that the plan adds, on the whole batch of a rank
        self._square = 0.0  # the squared gradient that this was predicted for
        self._predicted_at_8_bits: float | None = None  # the same variance, if all that is rounded had 8 bits
        self._own_names: dict[str, bool] = {}  # of what the last comparison rounded or made of that; whether the latter
        self._warned = False
        self._lacks_bytes = False  # a search has found more than there is memory to store exactly
        self._least_parts = 1  # of a batch, one of which memory may be enough for

    def verify(
        self,
        batch: ProbeBatch,
        plan: Plan,
        step: int,
        *,
        predicted: float | None = None,
        predicted_at_8_bits: float | None = None,
        variances: Mapping[str, float] | None = None,
        provisional: bool = False,
        search: bool = True,
        fits: Callable[[Iterable[str]], bool] = lambda _: True,
    ) -> Verdict:
        """Compare, and search if that shows a fault. A collective call. See [Note: faults].

        predicted: variance that the plan adds to the gradient of a rank's batch, and predicted_at_8_bits what it would
        add if all that it rounds had 8 bits; without them, those of the last adaptation. variances: of single tensors,
        to begin the search with the largest. provisional: the next step is to verify as well. search: false leaves a
        fault to the caller. fits: whether there is memory to store some tensors exactly, the same on every rank; else
        they stay rounded.
        Raises on every rank what the loss function or the model raised on any, unless the loss is a guess.
        """
        if predicted is not None:
            self._predicted_at_8_bits = predicted_at_8_bits
        seen, reason, compare = self._examined(batch, plan, step, predicted)
        if seen.compared:
            errors = {"predicted": self._expected(seen), "measured": seen.error, "squared_gradient": seen.square}
            self.latest = {"step": step, **errors}
        # a gradient that overflows, as while a loss scale settles, is compared again in the next step
        if not provisional and (seen.compared or not seen.overflowed):
            self.at = step
        if not seen.compared:
            return Verdict(False, {})
        if reason is None:
            self._warn_of_noise(seen)
            return Verdict(True, {}, refutes=self._refutes(seen))
        if not search:
            return Verdict(True, {}, reason)
        if self._lacks_bytes:  # another search would take long, and find as much
            return Verdict(True, {}, reason)
        found, complete = self._culprits(plan, variances or {}, compare)
        if not fits(found):
            self._lacks_bytes = not provisional
            if self._is_first:
                _log.log(logging.INFO if provisional else logging.WARNING, _DOES_NOT_FIT, reason, _listed(found))
            return Verdict(True, {}, reason)
        mended = compare(plan.updated(dict.fromkeys(found)))
        self._warn_of_noise(mended)
        return Verdict(True, self._store_exactly(found, reason, complete), refutes=self._refutes(mended))

    def _refutes(self, seen: _Seen) -> bool:
        expected = 0.0 if self._predicted is None else self._expected(seen)
        return seen.compared and seen.finite and expected > max(seen.square, self._limit * seen.error)

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt."""
        predicted = {"predicted": self._predicted, "predicted_at_8_bits": self._predicted_at_8_bits}
        return {"exact": self.exact, "at": self.at, "square": self._square, **predicted}

    @staticmethod
    def parse_state(state: Mapping[str, Any]) -> LearntByVerifying:
        """What load_state() takes, from what state_dict() gave. Raises StateError."""
        number = _fields.number(0.0)
        return LearntByVerifying(
            _fields.read(state, "exact", _fields.mapping(_fields.text), {}),
            _fields.read(state, "at", _fields.optional(_fields.integer(0)), None),
            _fields.read(state, "predicted", _fields.optional(number), None),
            _fields.read(state, "square", number, 0.0),
            _fields.read(state, "predicted_at_8_bits", _fields.optional(number), None),
        )

    def load_state(self, learnt: LearntByVerifying) -> None:
        """Go on with what parse_state() returned."""
        self.exact, self.at, self._predicted, self._square, self._predicted_at_8_bits = dict(learnt.exact), *learnt[1:]

    # -- one comparison ---------------------------------------------------------------------------------------------

    def _examined(
        self, batch: ProbeBatch, plan: Plan, step: int, predicted: float | None
    ) -> tuple[_Seen, str | None, _Compare]:
        """(what was seen under a plan, what is wrong with it, how to see the same of another plan)"""
        for parts in (_PARTS, 1):  # all examples are to confirm a fault
            compare = partial(self._compare, batch, step, parts)
            seen, reason = compare(plan), None
            if not seen.compared:
                break
            if predicted is not None:
                # a rank whose rounded gradient is not finite has no numbers
                self._predicted, self._square = predicted, seen.square if math.isfinite(seen.square) else 0.0
            reason = self._fault(seen, plan, compare)
            if reason is None:
                break
        return seen, reason, compare

    def _compare(self, batch: ProbeBatch, step: int, parts: int, plan: Plan) -> _Seen:
        """parts: how many times more examples a batch has than are compared, if memory is enough."""
        parts = max(parts, self._least_parts)
        tried = 1.0 if parts > 1 else math.inf
        while True:
            own, fraction, fits = self._own(batch, step, parts, plan)
            lacks, tried = not fits and fraction < tried, fraction  # else the batch cannot be divided any further
            overflowed = own is not None and not own.exact_is_finite
            row, broken = [math.nan] * 3, False
            if own is not None and own.exact_is_finite:
                row, broken = [1.0 / fraction, own.square, own.error], not math.isfinite(own.error)
            self._own_names = {}
            if own is not None:
                self._own_names = dict.fromkeys(own.rounded, False) | dict.fromkeys(own.derived, True)
            conditions = [own is not None and own.exact_is_finite, overflowed, broken, lacks]
            any_compares, any_overflows, any_breaks, any_lacks = distributed.any_rank(conditions, self._groups)
            if not any_lacks or parts == _MOST_PARTS:
                break
            self._least_parts = parts = 2 * parts
        values = torch.tensor([row], dtype=torch.float64, device="cpu")
        parts, square, error = distributed.reduce_over([_GRADIENT], values, self._groups).mean[0].tolist()
        return _Seen(any_compares, any_overflows, not any_breaks, error, square, parts)

    def _own(self, batch: ProbeBatch, step: int, parts: int, plan: Plan) -> tuple[Comparison | None, float, bool]:
        """What this rank sees, None if it cannot compare; the fraction of its batch; whether its memory was enough."""
        tried = 1.0

        def compare(part: ProbePart) -> Comparison:
            nonlocal tried
            tried = part.fraction
            return compared(self._hooks, self._model, part.forward, plan, draw=step, fraction=part.fraction)

        done = attempt(
            "comparing the gradient with the exact one",
            compare,
            batch.beginnings(parts),
            None if batch.is_guess else batch.loss_of_whole,
            model=self._model,
            blocks=self._hooks.config.blocks,
            groups=self._groups,
        )
        if done.result is not None:
            return done.result, tried, True
        if done.ending is Ending.LACKS_MEMORY:
            return None, tried, False
        if done.ending is Ending.NOT_HERE:
            distributed.say_once(_log, _CANNOT_COMPARE, done.reason, level=logging.INFO)
        return None, 1.0, True

    def _fault(self, seen: _Seen, plan: Plan, compare: _Compare) -> str | None:
        """What is wrong under a plan of which this was seen; None if nothing is. See [Note: faults]."""
        if not seen.finite:
            return "the gradient is not finite"
        expected = self._expected(seen)
        is_suspect = seen.error > max(self._limit * expected, _NEGLIGIBLE * seen.square)
        if is_suspect and seen.error > self._limit * self._spread(plan, compare) * expected:
            return f"the gradient's squared error is {seen.error:.3g}, {expected:.3g} is predicted"
        if not seen.error > seen.square > 0.0:
            return None
        if seen.error > _HOPELESS * seen.square:
            return f"the gradient's squared error is {seen.error:.3g}, its square {seen.square:.3g}"
        widest = _widest(plan)
        again = seen if widest == plan else compare(widest)
        if again.finite and again.error <= again.square:
            return None
        return f"even at 8 bits the gradient's squared error is {again.error:.3g}, its square {again.square:.3g}"

    def _spread(self, plan: Plan, compare: _Compare) -> float:
        """How much more these examples move the gradient than those that were measured. See [Note: faults]."""
        widest = _widest(plan)
        if not self._predicted or not self._predicted_at_8_bits or widest == plan:
            return 1.0
        seen = compare(widest)
        if not (seen.compared and seen.finite and seen.error <= _NEGLIGIBLE * seen.square):
            return 1.0
        return max(1.0, seen.error / (self._expected(seen) * self._predicted_at_8_bits / self._predicted))

    def _expected(self, seen: _Seen) -> float:
        """The error that the last adaptation predicts for such a part of the examples."""
        if self._predicted is None:
            return math.inf
        growth = max(1.0, seen.square / self._square) if self._square > 0.0 else 1.0
        return self._predicted * seen.parts * growth

    def _warn_of_noise(self, seen: _Seen) -> None:
        if seen.error > seen.square > 0.0 and not self._warned:
            self._warned = True
            if not self._is_first:
                return
            _log.warning(
                "rounding adds more noise to the gradient than there is gradient: its squared error is %.3g and its "
                "square %.3g; use more bits, or policy acgc, which keeps to an error",
                seen.error,
                seen.square,
            )

    # -- the search -------------------------------------------------------------------------------------------------

    def _store_exactly(self, found: Sequence[str], reason: str, complete: bool) -> dict[str, str]:
        if found and self._is_first:
            _log.warning(
                "stored exactly from now on: %s%s, because with rounding %s",
                _listed(found),
                "" if complete else " (some of these may be fine: the search has taken as long as it may)",
                reason,
            )
        self._hooks.store(found)
        self.exact.update(dict.fromkeys(found, reason))
        return dict.fromkeys(found, reason)

    def _culprits(self, plan: Plan, variances: Mapping[str, float], compare: _Compare) -> tuple[list[str], bool]:
        """The tensors that have to be stored exactly for a fault to vanish, and whether the search was completed."""
        own = torch.tensor([*self._own_names.values()], dtype=torch.float64, device="cpu").unsqueeze(1)
        names, derived = distributed.max_over_groups(tuple(self._own_names), own, self._groups)
        is_derived = dict(zip(names, derived.flatten().tolist(), strict=True))
        # what is made of others first: if it is to blame, these need not be stored exactly
        names = tuple(sorted(names, key=lambda name: (-is_derived[name], -variances.get(name, 0.0))))

        def vanishes(tried: Sequence[str]) -> bool:
            changed = plan.updated(dict.fromkeys(tried))
            seen = compare(changed)
            return seen.compared and self._fault(seen, changed, compare) is None

        ends_s = perf_counter() + _MOST_SECONDS

        def in_time() -> bool:
            (is_late,) = distributed.any_rank([perf_counter() > ends_s], self._groups)
            return not is_late

        if not vanishes(names):
            if self._is_first:
                _log.warning(
                    "the gradient differs from the exact one even with every tensor stored exactly: the model computes "
                    "something else each time, or bits are not the cause; the plan stays as it is"
                )
            return [], True
        return _search(self._kinds(names), vanishes, in_time)

    def _kinds(self, names: Sequence[str]) -> list[list[str]]:
        """The names, those together that differ only in the number of a layer."""
        modules = distributed.unwrap(self._model).named_modules()
        classes = {distributed.user_path(path): type(module) for path, module in modules}
        kinds: dict[Any, list[str]] = {}
        for name in names:
            path, _, rest = name.partition(":")
            kinds.setdefault((re.sub(r"\b\d+\b", "0", path), classes.get(path), rest), []).append(name)
        return list(kinds.values())


def _search(
    kinds: Sequence[Sequence[str]], vanishes: Callable[[Sequence[str]], bool], in_time: Callable[[], bool]
) -> tuple[list[str], bool]:
    """(the names that have to be tried for a fault to vanish, whether none too many). See [Note: search].

    vanishes(names): it does with all of them. in_time(): whether another plan may be tried.
    """
    found: list[Sequence[str]] = []
    suspects, too_few, tries = list(kinds), 0, 0  # that storing none of them does not do is known at first
    while suspects:
        enough = len(suspects)
        while enough - too_few > 1:
            if tries == _MOST_TRIES or not in_time():
                return _flat([*found, *suspects[:enough]]), False
            tries += 1
            tried = 0 if too_few < 0 else (too_few + enough) // 2
            if vanishes(_flat([*found, *suspects[:tried]])):
                enough = tried
            else:
                too_few = tried
        suspects, too_few = suspects[:enough], -1  # most often none of those that are left is another culprit
        if enough:
            found.append(suspects.pop())
    return _flat(found), True


def _flat(kinds: Iterable[Sequence[str]]) -> list[str]:
    return [name for kind in kinds for name in kind]


def _widest(plan: Plan) -> Plan:
    """The same tensors rounded, to 8 bits each."""
    bits = {name: None if width is None else WIDTHS for name, width in plan.bits.items()}
    return Plan(bits, None if plan.default is None else WIDTHS)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
