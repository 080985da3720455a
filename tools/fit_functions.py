"""Prints the coefficients of csrc/cpu/functions.h: where they come from, and how well they fit.

.venv/bin/python tools/fit_functions.py
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.polynomial import chebyshev

POINTS = 6000
ROUNDS = 400
Function = Callable[[np.ndarray], np.ndarray]


def normal(x: np.ndarray) -> np.ndarray:
    """The normal distribution function: GELU's step."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


def normal_slope(x: np.ndarray) -> np.ndarray:
    """The derivative of x normal(x)."""
    return normal(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _inner(x: np.ndarray) -> np.ndarray:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def tanh(x: np.ndarray) -> np.ndarray:
    """The step of GELU's approximation by tanh."""
    return 0.5 * (1 + np.tanh(_inner(x)))


def tanh_slope(x: np.ndarray) -> np.ndarray:
    """The derivative of x tanh(x)."""
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return tanh(x) + 0.5 * x * slope / np.cosh(_inner(x)) ** 2


STEPS: dict[str, tuple[Function, float, int]] = {
    "kGelu": (normal, 5.25, 13),
    "kGeluSlope": (normal_slope, 5.75, 16),
    "kGeluTanh": (tanh, 5.0, 13),
    "kGeluTanhSlope": (tanh_slope, 5.25, 17),
}
"""(function, bound, degree)"""


def fit(step: Function, bound: float, degree: int) -> np.ndarray:
    """The polynomial of 2 (x / bound)^2 - 1 whose product with x is nearest to step(x) - 1/2 where it is farthest
    (Lawson's iteration)."""
    s = np.cos(np.pi * (np.arange(POINTS) + 0.5) / POINTS)
    x = bound * np.sqrt((s + 1) / 2)
    wanted, basis, weight = (step(x) - 0.5) / x, chebyshev.chebvander(s, degree), np.ones(POINTS)
    for _ in range(ROUNDS):
        scale = np.sqrt(weight) * np.maximum(x, 1e-3)
        found = np.linalg.lstsq(basis * scale[:, None], wanted * scale, rcond=None)[0]
        error = np.abs(basis @ found - wanted) * x
        weight *= error / error.max() + 1e-9
        weight /= weight.sum()
    return chebyshev.cheb2poly(found).astype(np.float32)


def main() -> None:
    for name, (step, bound, degree) in STEPS.items():
        coefficients = fit(step, bound, degree)
        x = np.linspace(-bound, bound, 100_001)
        s = 2 * (x / bound) ** 2 - 1
        error = np.abs(x * np.polyval(coefficients[::-1].astype(float), s) + 0.5 - step(x)).max()
        print(f"{name}: bound {bound}, largest error {error:.1e}, beyond the bound {step(np.array([-bound]))[0]:.1e}")
        print("    " + ", ".join(f"{value:.9e}f" for value in coefficients))


if __name__ == "__main__":
    main()
