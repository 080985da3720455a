"""The file of results of this folder's scripts, an entry for each.

python -m benchmarks.reliability.results FILE ENTRY KEY=VALUE ...     sets an entry, for scripts of other languages
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import gact_dist
from benchmarks.adaptation.bench_adaptation import processor

FILE = Path("benchmarks/results/reliability.json")


def write(path: Path, entry: str, figures: dict[str, Any]) -> None:
    """Replace an entry of a file, with the date and the versions; other entries stay."""
    known = json.loads(path.read_text()) if path.exists() else {}
    about = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gact_dist": gact_dist.__version__,
    }
    known[entry] = {**about, **figures}
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    target, name, *pairs = sys.argv[1:]
    write(Path(target), name, dict(pair.split("=", 1) for pair in pairs))
