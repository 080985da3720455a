"""Accuracy of the example runs: untouched, L2 and L2.2, three seeds each, on two ranks.

    .venv/bin/python benchmarks/accuracy.py --json benchmarks/results/accuracy.json

Runs launch/train.py for every configuration, level and seed that the file does not hold yet (it can be stopped and
started again), then prints a table: accuracy averaged over the seeds, its difference to the untouched job, the spread
of the untouched job over its seeds, and the ratio of exact to retained activation bytes.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ("graph", "text", "image")
LEVELS = ("L0", "L2.2", "L2")


def run(config, level, seed):
    """One run of launch/train.py on two ranks: what it reached."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(ROOT / "launch" / "train.py"), "--config", config, "--level", level]
        command += ["--seed", str(seed), "--output", folder]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ}, stderr=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    report = result["report"] or {}
    found = {"config": config, "level": level, "seed": seed, "accuracy": result["accuracy"]}
    found |= {"test_loss": result["test_loss"], "final_loss": statistics.mean(result["losses"][-10:])}
    return found | {"ratio": report["exact_bytes"] / report["retained_bytes"] if report else 1.0}


def table(runs):
    """Markdown: one row for each configuration and level."""
    lines = ["| model | level | accuracy, mean of seeds | against untouched | untouched's own spread | ratio |"]
    lines.append("|---|---|---|---|---|---|")
    for config in CONFIGS:
        chosen = {level: [r for r in runs if (r["config"], r["level"]) == (config, level)] for level in LEVELS}
        if not all(chosen.values()):
            continue
        untouched = [100 * r["accuracy"] for r in chosen["L0"]]
        for level, results in chosen.items():
            mean = statistics.mean(100 * r["accuracy"] for r in results)
            ratio = min(r["ratio"] for r in results)
            lines.append(
                f"| {config} | {level} | {mean:.2f} | {mean - statistics.mean(untouched):+.2f} | "
                f"{min(untouched):.1f} to {max(untouched):.1f} | {ratio:.1f} |"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    runs = json.loads(options.json.read_text())["runs"] if options.json.exists() else []
    done = {(r["config"], r["level"], r["seed"]) for r in runs}
    facts = {"date": str(datetime.date.today()), "machine": platform.machine(), "cores": os.cpu_count()}
    for seed in range(options.seeds):
        for config in CONFIGS:
            for level in LEVELS:
                if (config, level, seed) in done:
                    continue
                runs.append(run(config, level, seed))
                print(json.dumps(runs[-1]), flush=True)
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(facts | {"torch": torch.__version__, "runs": runs}, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
