"""The multiple-choice knapsack: one of nine options for each row, least cost within a capacity.

The linear relaxation is greedy on the slopes of the lower convex hulls, and only the step that no longer fits has to be
rounded. With many rows of similar weight that costs nothing; with few, or with one that outweighs the rest, greedy
costs up to several times the optimum (measured in benchmarks/results/README.md). So the rows for which rounding matters
most are enumerated as a Pareto front while the others follow the greedy curve, after Pisinger (A minimal algorithm for
the multiple-choice knapsack problem, 1995).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The greedy solution is good enough where the linear relaxation proves it this close to optimal.
_GAP_TOLERANCE = 1e-3
# Sums of rounded products may exceed a budget that is met exactly; 1e-12 is far above their error, far below one bit.
ROUNDING = 1.0 + 1e-12
_ENUMERATED_ROWS = 24
_FRONT_STATES = 2048
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
    if best - bound <= _GAP_TOLERANCE * best:
        return choice, bound
    # An option whose excess alone is above the gap is in no better choice (Pisinger's class reduction).
    excess = problem.cost + multiplier * problem.weight
    excess -= excess.min(axis=1, keepdims=True)
    candidate = _enumerate(problem, np.where(excess <= best - bound, problem.cost, np.inf), best)
    return (candidate if problem.totals(candidate)[0] < best else choice), bound


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


def _enumerate(problem: Problem, cost: Floats, best: float) -> Integers:
    """The best combination of a Pareto front over the rows of the largest steps with the greedy curve of all others.

    cost: [L, 9], the problem's, inf for options that are in no choice of less than ``best``.
    """
    rows = _largest(problem, np.isfinite(cost))
    enumerated = np.zeros(len(problem.base), dtype=np.bool_)
    enumerated[rows] = True
    outside = ~enumerated[problem.step_row]
    rest = np.flatnonzero(~enumerated)
    rest_weight = problem.weight[rest, problem.base[rest]].sum() + _cumulative(problem.step_weight[outside])
    rest_cost = _cumulative(problem.step_cost[outside])

    front = _Front.over(problem, rows, cost, problem.capacity - rest_weight[0], best)
    if not len(front.cost):  # nothing that may be better fits
        return problem.base
    # Rounding may put even the lightest rest an ulp above what a state leaves; that is no step, not the last one.
    steps = np.maximum(np.searchsorted(rest_weight, problem.capacity - front.weight, side="right") - 1, 0)
    state = int(np.argmin(front.cost + rest_cost[steps]))

    choice = problem.after(int(steps[state]), outside)
    choice[rows] = front.options(state)
    return _fill(problem, choice)


def _largest(problem: Problem, useful: NDArray[np.bool_]) -> Integers:
    """The rows whose useful options differ the most in weight."""
    span = np.where(useful, problem.weight, -np.inf).max(axis=1) - np.where(useful, problem.weight, np.inf).min(axis=1)
    largest: Integers = np.argsort(-span, kind="stable")[:_ENUMERATED_ROWS]
    return largest


def _cumulative(values: Floats) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True)
class _Front:
    """Combinations of the rows' options that no other beats in both weight and cost, [S] in order of weight.

    history holds for each row, in order, the (parent state, option) of each state.
    """

    weight: Floats
    cost: Floats
    history: tuple[tuple[Integers, Integers], ...]

    @staticmethod
    def over(problem: Problem, rows: Integers, cost: Floats, room: float, best: float) -> _Front:
        """The front over ``rows`` of what weighs at most ``room`` and may lead to less than ``best``."""
        lightest, cheapest = problem.weight[rows, problem.base[rows]], cost.min(axis=1)
        heaviest = room - lightest.sum() + np.cumsum(lightest)
        dearest = best - cheapest.sum() + np.cumsum(cheapest[rows])
        front = _Front(np.zeros(1), np.zeros(1), ())
        for row, most_weight, most_cost in zip(rows, heaviest, dearest, strict=True):
            front = front.extended(cost[row], problem.weight[row], most_cost, most_weight)
        return front

    def extended(self, cost: Floats, weight: Floats, most_cost: float, most_weight: float) -> _Front:
        """The front of this one's states with one row more, given what its options cost and weigh ([9])."""
        costs, weights = np.add.outer(cost, self.cost).ravel(), np.add.outer(weight, self.weight).ravel()
        usable = np.flatnonzero((costs <= most_cost) & (weights <= most_weight))
        # Option by option these are nine sorted runs, which the stable sort merges in a fraction of a sort's time.
        order = usable[np.argsort(weights[usable], kind="stable")]
        cheapest = np.minimum.accumulate(costs[order])
        kept = order[costs[order] < np.concatenate([[np.inf], cheapest[:-1]])[: len(order)]]
        # Of equal weights the last that is left is the cheapest.
        kept = kept[np.diff(weights[kept], append=np.inf) > 0]
        if len(kept) > _FRONT_STATES:
            # Even in rank, so that dense stretches of the front stay dense, and the lightest stays.
            kept = kept[np.linspace(0, len(kept) - 1, _FRONT_STATES).astype(np.int64)]
        states = max(1, len(self.weight))
        return _Front(weights[kept], costs[kept], (*self.history, (kept % states, kept // states)))

    def options(self, state: int) -> list[int]:
        """The options, one a row, that lead to a state."""
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
