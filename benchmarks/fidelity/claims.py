"""What is claimed of the policies, and whether benchmarks/fidelity/run.py has found it so, model by model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.fidelity.report import (
    IN_BYTES_OF_STORED,
    LESS_BYTES,
    STORED,
    Rows,
    beside_uniform,
    bytes_over_uniform,
    deviation,
    differences,
    gains_in_same_bytes,
    model_names,
    untouched_by_seed,
    variance_in_fewer_bytes,
)

ERROR = 0.25  # of policy acgc
IMAGE = "image"
NARROWEST = "uniform 1"
LOSS_AT_2_BITS, RATIO_AT_2_BITS = 0.5, 12.0  # points of accuracy; of bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim about one model."""

    text: str
    model: str
    found: str
    bound: str
    holds: bool


def claims_table(held: dict[str, Any], bits: tuple[int, ...]) -> str:
    """Markdown. bits: the uniform widths in whose bytes adaptive ones were compared."""
    lines = ["| claim | model | found | bound | holds |", "|---|---|---|---|---|"]
    for claim in claims(held, bits):
        holds = "yes" if claim.holds else "**no**"
        lines.append(f"| {claim.text} | {claim.model} | {claim.found} | {claim.bound} | {holds} |")
    return "\n".join(lines)


def claims(held: dict[str, Any], bits: tuple[int, ...]) -> Iterator[Claim]:
    """Those whose runs are there."""
    for model in model_names(held["runs"]):
        runs = [row for row in held["runs"] if row["model"] == model]
        comparisons = [row for row in held["comparisons"] if row["model"] == model]
        yield from _at_4_bits(model, runs)
        if model == IMAGE:
            yield from _two_bits(model, runs)
        yield from _derived(model, runs, comparisons)
        yield from _error_bound(model, runs, comparisons)
        for width in bits:
            gains = [gain for _, gain in gains_in_same_bytes(comparisons, width)]
            if gains:
                text = f"less variance than uniform {width} in its bytes, at the least"
                yield Claim(text, model, f"{min(gains):.3g} times", "more than 1", min(gains) > 1.0)


def _at_4_bits(model: str, runs: Rows) -> Iterator[Claim]:
    """No loss of accuracy, and no more of the test loss, beyond the untouched job's own spread."""
    untouched = untouched_by_seed(runs)
    for setting in ("gact 4", "actnn 4"):
        chosen = _paired(runs, setting)
        if len(untouched) < 2 or not chosen:
            continue
        points = statistics.mean(differences(chosen, untouched, "accuracy", scale=100))
        spread = deviation([100 * row["accuracy"] for row in untouched.values()])
        text = f"accuracy of {setting} against untouched, points, within a deviation over seeds"
        yield Claim(text, model, f"{points:+.2f}", f"{-spread:+.2f}", points >= -spread)
        loss = statistics.mean(differences(chosen, untouched, "test_loss"))
        spread = deviation([row["test_loss"] for row in untouched.values()])
        text = f"test loss of {setting} against untouched, within a deviation over seeds"
        yield Claim(text, model, f"{loss:+.4f}", f"{spread:+.4f}", loss <= spread)


def _two_bits(model: str, runs: Rows) -> Iterator[Claim]:
    untouched, chosen = untouched_by_seed(runs), _paired(runs, "actnn 2")
    if chosen:
        points = statistics.mean(differences(chosen, untouched, "accuracy", scale=100))
        ratio = min(row["exact_bytes"] / row["retained_bytes"] for row in chosen)
        text = "accuracy of actnn 2 against untouched, points"
        yield Claim(text, model, f"{points:+.2f}", f"{-LOSS_AT_2_BITS:+.2f}", points >= -LOSS_AT_2_BITS)
        yield Claim(
            "ratio of bytes of actnn 2", model, f"{ratio:.1f}", f"{RATIO_AT_2_BITS:g}", ratio >= RATIO_AT_2_BITS
        )


def _derived(model: str, runs: Rows, comparisons: Rows) -> Iterator[Claim]:
    """What is not stored because it can be made again leaves its bits to the rest."""
    untouched, chosen = untouched_by_seed(runs), _paired(runs, IN_BYTES_OF_STORED)
    if chosen:
        points = statistics.mean(differences(chosen, untouched, "accuracy", scale=100))
        text = f"accuracy of gact against untouched, points, in the bytes of {STORED}"
        yield Claim(text, model, f"{points:+.2f}", f"{-LOSS_AT_2_BITS:+.2f}", points >= -LOSS_AT_2_BITS)
    for bits in (3, 4):
        ratios = variance_in_fewer_bytes(comparisons, bits)
        if ratios:
            mean = statistics.geometric_mean(ratios)
            text = f"variance in {LESS_BYTES:g} of the bytes that {bits} bits take if all is stored, over that, mean"
            yield Claim(text, model, f"{mean:.3g}", "1", mean <= 1.0)


def _error_bound(model: str, runs: Rows, comparisons: Rows) -> Iterator[Claim]:
    setting = f"acgc {ERROR}"
    increases = [moment["measured"] for row in runs if row["setting"] == setting for moment in row["moments"]]
    if increases:
        for name, increase in (("mean", statistics.mean(increases)), ("worst moment", max(increases))):
            text = f"increase under {setting} in the runs, {name}"
            yield Claim(text, model, f"{increase:.3g}", f"{ERROR:g}", increase <= ERROR)
    ratios = bytes_over_uniform(comparisons, setting, ERROR)
    if ratios:
        widths = {uniform["setting"] for _, uniform in beside_uniform(comparisons, setting, ERROR)}
        holds = max(ratios) < 1.0 or (widths == {NARROWEST} and max(ratios) == 1.0)
        bound = "1, no tensor has fewer bits" if widths == {NARROWEST} else "less than 1"
        text = f"bytes of {setting} over those of the narrowest uniform width within, at the most"
        yield Claim(text, model, f"{max(ratios):.3g}", bound, holds)


def _paired(runs: Rows, setting: str) -> Rows:
    untouched = untouched_by_seed(runs)
    return [row for row in runs if row["setting"] == setting and row["seed"] in untouched]
