"""The files that a run writes: result.json, its settings and measurements, and history.jsonl, its adaptations."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .config import RunConfig
from .loop import Measured
from .peak_memory import MEASURED_STEPS
from .ranks import Ranks

MIB = 2**20
ROW_FIELDS = ("name", "shape", "dtype", "codec", "bits", "bytes", "sensitivity")


def write_result(
    folder: Path,
    *,
    config: RunConfig,
    options: argparse.Namespace,
    ranks: Ranks,
    device: torch.device,
    measured: Measured,
) -> Path:
    """Write result.json and history.jsonl to `folder`, which is created if necessary. Returns the path of the first.

    history.jsonl has one line for each adaptation, with the bits and the sensitivity of every tensor.
    """
    # The first steps are slower, because peak memory is measured in them.
    step_times_s = measured.step_times_s[MEASURED_STEPS:] or measured.step_times_s
    result = {
        "config_name": Path(options.config).stem,
        "config": asdict(config),
        "level": options.level,
        "seed": options.seed,
        "world_size": ranks.world_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "losses": measured.losses,
        "accuracy": measured.accuracy,
        "test_loss": measured.test_loss,
        "step_time_median_s": statistics.median(step_times_s),
        "step_time_mean_s": statistics.fmean(step_times_s),
        "peak_bytes": max(measured.step_peaks_bytes),
        "step_peak_median_bytes": int(statistics.median(measured.step_peaks_bytes)),
        "step_peaks_bytes": measured.step_peaks_bytes,
        "report": report_entry(measured.report),
        "plan": measured.plan,
        "weights_sha256": measured.weights_sha256,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in measured.history))
    path = folder / "result.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return path


def closing(measured: Measured, path: Path) -> str:
    """What a run says at its end."""
    lines = [
        f"test accuracy {measured.accuracy:.1%}, test loss {measured.test_loss:.4f}, "
        f"training loss of the last step {measured.losses[-1]:.4f}",
        f"peak memory above the start of training: {max(measured.step_peaks_bytes) / MIB:.0f} MiB",
    ]
    if measured.report is not None:
        exact, retained = measured.report.exact_bytes / MIB, measured.report.retained_bytes / MIB
        lines.append(
            f"activations kept for backward: {retained:.1f} MiB in place of {exact:.1f} MiB, "
            f"{measured.report.ratio:.1f} times smaller"
        )
    lines.append(f"results: {path}; a page of them: gact-dist report {path.parent}")
    return "\n".join(lines)


def report_entry(report: Any) -> dict[str, Any] | None:
    """A MemoryReport as values for JSON; None for an untouched run."""
    if report is None:
        return None
    return {
        "exact_bytes": report.exact_bytes,
        "retained_bytes": report.retained_bytes,
        "ratio": report.ratio,
        "rows": [{name: getattr(row, name) for name in ROW_FIELDS} for row in report.rows],
    }
