"""The multiple-choice knapsack: one of nine options for each row, least cost within a capacity.

In the manner of Pisinger (A minimal algorithm for the multiple-choice knapsack problem, 1995): the linear relaxation is
greedy on the slopes of the lower convex hulls; the rows for which rounding it matters (the core) are then enumerated as
a Pareto front while the others follow the greedy curve.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Stop as soon as the linear relaxation proves the solution this close to optimal.
_GAP_TOLERANCE = 1e-3
# Sums of rounded products may exceed a budget that is met exactly; 1e-12 is far above their error, far below one bit.
ROUNDING = 1.0 + 1e-12
_CORE_TENSORS = 24
_FRONT_STATES = 2048
_ROUNDS = 2
_FILL_STEPS = 8

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Minimise sum cost[l, j_l] with sum weight[l, j_l] <= capacity; cost inf forbids an option. Arrays are [L, 9].

    The steps are the edges of all lower convex hulls, steepest first: taking the first k of them, for any k, is an
    optimal solution for the weight that it uses.
    """

    cost: Floats
    weight: Floats
    capacity: float
    base: Integers  # [L] lightest allowed option
    step_row: Integers
    step_option: Integers  # the option that a step leads to
    step_cost: Floats  # negative
    step_weight: Floats

    @staticmethod
    def build(cost: Floats, weight: Floats, capacity: float) -> Problem:
        order = np.argsort(weight, axis=1, kind="stable")
        by_weight, by_cost = np.take_along_axis(weight, order, axis=1), np.take_along_axis(cost, order, axis=1)
        on_hull = _lower_hull(by_cost, by_weight)
        rows, columns = np.nonzero(on_hull)
        same = rows[1:] == rows[:-1]
        start, end = (rows[:-1][same], columns[:-1][same]), (rows[1:][same], columns[1:][same])
        step_cost, step_weight = by_cost[end] - by_cost[start], by_weight[end] - by_weight[start]
        steepest = np.argsort(_slope(step_cost, step_weight), kind="stable")
        base = order[np.arange(len(cost)), on_hull.argmax(axis=1)]
        return Problem(
            cost,
            weight,
            capacity,
            base,
            end[0][steepest],
            order[end][steepest],
            step_cost[steepest],
            step_weight[steepest],
        )

    def after(self, steps: int, among: NDArray[np.bool_] | slice) -> Integers:
        """The choice [L] that the first ``steps`` of the selected steps lead to."""
        choice: Integers = self.base.copy()
        # Of several steps of one row the last wins, which is the farthest along its hull.
        choice[self.step_row[among][:steps]] = self.step_option[among][:steps]
        return choice

    def totals(self, choice: Integers) -> tuple[float, float]:
        """Cost and weight of a choice [L]."""
        rows = np.arange(len(choice))
        return float(self.cost[rows, choice].sum()), float(self.weight[rows, choice].sum())


def _slope(cost: Floats, weight: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(cost / weight, nan=0.0, posinf=np.inf, neginf=-np.inf)


def _lower_hull(cost: Floats, weight: Floats) -> NDArray[np.bool_]:
    """Which points [L, 9], in order of weight, lie on the falling part of their row's lower convex hull.

    A point does when no slope to it from the left exceeds a slope from it to the right. Among points of equal weight
    the first may stay beside a cheaper one: that step is free and is always taken.
    """
    options = cost.shape[1]
    steepest_in = np.full(cost.shape, -np.inf)
    steepest_out = np.full(cost.shape, np.inf)
    with np.errstate(invalid="ignore"):
        for left in range(options):
            for right in range(left + 1, options):
                slope = _slope(cost[:, right] - cost[:, left], weight[:, right] - weight[:, left])
                np.maximum(steepest_in[:, right], slope, out=steepest_in[:, right])
                np.minimum(steepest_out[:, left], slope, out=steepest_out[:, left])
    return np.isfinite(cost) & (steepest_in < 0) & (steepest_in <= steepest_out)


def minimise(problem: Problem) -> tuple[Integers, float]:
    """The best choice [L] found and a lower bound of the cost of any."""
    choice, bound, multiplier = _relaxation(problem)
    choice = _fill(problem, choice)
    best = problem.totals(choice)[0]
    excess = problem.cost + multiplier * problem.weight
    excess -= excess.min(axis=1, initial=np.inf, keepdims=True)
    for _ in range(_ROUNDS):
        gap = best - bound
        if gap <= _GAP_TOLERANCE * best:
            break
        # An option whose excess alone is above the gap is in no better solution (Pisinger's class reduction).
        useful = excess <= gap
        useful[np.arange(len(choice)), choice] = True  # rounding must not lose the solution in hand
        candidate = _enumerate(problem, useful, multiplier, best)
        if candidate is None or problem.totals(candidate)[0] >= best:
            break
        choice, best = candidate, problem.totals(candidate)[0]
    return choice, bound


def _relaxation(problem: Problem) -> tuple[Integers, float, float]:
    """The linear relaxation: its whole steps as a choice [L], its optimum, its Lagrange multiplier.

    The multiplier is the cost that one more unit of weight would save.
    """
    used = problem.totals(problem.base)[1] + np.cumsum(problem.step_weight)
    whole = int(np.searchsorted(used, problem.capacity, side="right"))
    choice = problem.after(whole, slice(None))
    cost, weight = problem.totals(choice)
    if whole == len(used):
        return choice, cost, 0.0
    multiplier = -float(problem.step_cost[whole] / problem.step_weight[whole])
    return choice, max(0.0, cost - multiplier * (problem.capacity - weight)), multiplier


def _choose_core(problem: Problem, useful: NDArray[np.bool_]) -> Integers:
    """Rows to enumerate: of those with more than one useful option, the ones with the largest steps in weight."""
    span = np.where(useful, problem.weight, -np.inf).max(axis=1) - np.where(useful, problem.weight, np.inf).min(axis=1)
    several = np.flatnonzero(span > 0)
    largest: Integers = several[np.argsort(-span[several], kind="stable")[:_CORE_TENSORS]]
    return largest


def _enumerate(problem: Problem, useful: NDArray[np.bool_], multiplier: float, best: float) -> Integers | None:
    """Best combination of a Pareto front over the core's useful options with the greedy curve of all other rows.

    None when every state of the front is proven, by ``multiplier``, to lead to no lower cost than ``best``.
    """
    core = _choose_core(problem, useful)
    in_core = np.zeros(len(problem.base), dtype=np.bool_)
    in_core[core] = True
    outside = ~in_core[problem.step_row]
    rest = np.flatnonzero(~in_core)
    rest_weight = problem.weight[rest, problem.base[rest]].sum() + _cumulative(problem.step_weight[outside])
    rest_cost = _cumulative(problem.step_cost[outside])

    limits = _Limits.build(problem, core, useful, np.array([0.0, multiplier]), best)
    front = _Front.over(problem, core, useful, problem.capacity - rest_weight[0], limits)
    if not len(front.cost):
        return None
    # Rounding may put even the lightest rest an ulp above what a state leaves; that is no step, not the last one.
    steps = np.maximum(np.searchsorted(rest_weight, problem.capacity - front.weight, side="right") - 1, 0)
    state = int(np.argmin(front.cost + rest_cost[steps]))

    choice = problem.after(int(steps[state]), outside)
    choice[core] = front.options(state)
    return _fill(problem, choice)


def _cumulative(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True)
class _Limits:
    """Proof that a state is useless: for any multiplier m >= 0, no completion costs less than cost + m weight + what
    the rows to come add at least - m capacity. One limit [M, C] on cost + m weight for each multiplier and core row.
    """

    multipliers: Floats
    limits: Floats

    @staticmethod
    def build(problem: Problem, core: Integers, useful: NDArray[np.bool_], multipliers: Floats, best: float) -> _Limits:
        allowed = np.where(useful, problem.cost, np.inf)
        least = np.stack([(allowed + multiplier * problem.weight).min(axis=1) for multiplier in multipliers])
        to_come = least.sum(axis=1, keepdims=True) - np.cumsum(least[:, core], axis=1)
        dual = (multipliers * problem.capacity)[:, None]
        slack = (ROUNDING - 1.0) * (best + dual + least.sum(axis=1, keepdims=True))
        return _Limits(multipliers, best + dual - to_come + slack)

    def admit(self, position: int, cost: Floats, weight: Floats) -> NDArray[np.bool_]:
        """Which states [S] may still lead to less than the best, once the core's row at ``position`` is in them."""
        admitted = np.isfinite(cost)
        for multiplier, limit in zip(self.multipliers, self.limits[:, position], strict=True):
            admitted &= cost + multiplier * weight <= limit
        return admitted


@dataclass(frozen=True)
class _Front:
    """Combinations of the core's options that no other beats in both weight and cost, [S] in order of weight.

    history holds for each row of the core, in order, the (parent state, option) of each state.
    """

    weight: Floats
    cost: Floats
    history: tuple[tuple[Integers, Integers], ...]

    @staticmethod
    def over(problem: Problem, core: Integers, useful: NDArray[np.bool_], room: float, limits: _Limits) -> _Front:
        front = _Front(np.zeros(1), np.zeros(1), ())
        lightest = problem.weight[core, problem.base[core]]
        needed_later = lightest.sum() - np.cumsum(lightest)
        for position, row in enumerate(core):
            cost = np.add.outer(np.where(useful[row], problem.cost[row], np.inf), front.cost).ravel()
            weight = np.add.outer(problem.weight[row], front.weight).ravel()
            fits = weight <= room - needed_later[position]
            front = front.extended(cost, weight, np.flatnonzero(fits & limits.admit(position, cost, weight)))
        return front

    def extended(self, cost: Floats, weight: Floats, usable: Integers) -> _Front:
        """The front of this one's states with one row more: cost, weight [9 S], option by option, and which to use."""
        # Option by option these are nine sorted runs, which the stable sort merges in a fraction of a sort's time.
        order = usable[np.argsort(weight[usable], kind="stable")]
        cheapest = np.minimum.accumulate(cost[order])
        kept = order[cost[order] < np.concatenate([[np.inf], cheapest[:-1]])[: len(order)]]
        # Of equal weights the last that is left is the cheapest.
        kept = kept[np.diff(weight[kept], append=np.inf) > 0]
        if len(kept) > _FRONT_STATES:
            # Even in rank, so that dense stretches of the front stay dense, and the lightest stays.
            kept = kept[np.linspace(0, len(kept) - 1, _FRONT_STATES).astype(np.int64)]
        states = max(1, len(self.weight))
        return _Front(weight[kept], cost[kept], (*self.history, (kept % states, kept // states)))

    def options(self, state: int) -> list[int]:
        """The options, one a row of the core, that lead to a state."""
        chosen = []
        for parent, option in reversed(self.history):
            chosen.append(int(option[state]))
            state = int(parent[state])
        return chosen[::-1]


def _fill(problem: Problem, choice: Integers) -> Integers:
    """Spend what capacity is left on single rows, largest saving first."""
    rows = np.arange(len(choice))
    for _ in range(_FILL_STEPS if len(choice) else 0):
        cost, weight = problem.cost[rows, choice], problem.weight[rows, choice]
        fits = problem.weight - weight[:, None] <= problem.capacity - weight.sum()
        saving = np.where(fits, cost[:, None] - problem.cost, 0.0)
        row, option = divmod(int(saving.argmax()), saving.shape[1])
        if saving[row, option] <= 0:
            break
        choice[row] = option
    return choice
