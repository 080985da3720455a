"""Runs an example of examples/ several times on two ranks: without gact_dist, and at levels.

    jobs = run_example("hf_trainer.py", tmp_path, "--output_dir", "{out}")
    jobs["exact"][0]["weights"]                          # of rank 0, at level exact

All runs share one launch of two ranks. The untouched job is the example without the lines that have `gact` in them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
UNTOUCHED = "untouched"
LEVELS = (UNTOUCHED, "exact", "L2")
ATTACHED = "attached"  # a Trainer's model at L2, without the callback
# Adaptations within the few steps of a test, and tensors as small as those of the examples.
SETTINGS = "config=__import__('gact_dist').Config.from_level({level!r}, adapt_interval=2, min_numel=64)"


def run_example(name: str, folder: Path, *arguments: str, levels: Sequence[str] = LEVELS) -> dict[str, list[Any]]:
    """{level: [what each rank found]} of runs of an example; "{out}" in an argument is a folder of the run's own."""
    from script_ranks import WORLD_SIZE, run_script

    run_script(Path(__file__), name, folder, json.dumps(list(levels)), *arguments)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {level: [found[level] for found in ranks] for level in levels}


def check(jobs: dict[str, list[Any]], least_ratio: float) -> None:
    """What holds for every framework: exact codecs change nothing, L2 adapts, saves, and is the same on both ranks."""
    plain, exact, rounded = (jobs[level] for level in LEVELS)
    assert [rank["weights"] for rank in exact] == [rank["weights"] for rank in plain]
    assert exact[0]["ratio"] == 1
    first, second = rounded
    assert first["plan"] == second["plan"] != {}
    assert first["adaptations"] >= 1
    assert first["weights"] != plain[0]["weights"]  # otherwise the lines above would compare nothing
    assert first["retained_bytes"] < exact[0]["retained_bytes"]
    assert first["ratio"] > least_ratio


def _at_level(source: str, level: str) -> str:
    source = re.sub(r"^del .*\n", "", source, flags=re.MULTILINE)  # its variables are looked at when it is over
    if level == UNTOUCHED:
        return "".join(line for line in source.splitlines(keepends=True) if "gact" not in line.lower())
    if level == ATTACHED:
        call = 'trainer.add_callback(GactCallback(trainer, "L2"))'
        assert source.count(call) == 1
        attach = f"gact = __import__('gact_dist').attach(trainer.model, {SETTINGS.format(level='L2')}).follow()"
        return source.replace(call, attach)
    given = 'level="L2"' if 'level="L2"' in source else '"L2"'
    assert source.count(given) == 1, given
    return source.replace(given, SETTINGS.format(level=level))


def _found(names: dict[str, Any]) -> dict[str, Any]:
    """What an example's variables show when it is over."""
    trainer = names.get("trainer")
    model = names.get("module") or names.get("model") if trainer is None else _model_of(trainer)
    parameters = list(model.parameters())
    found: dict[str, Any] = {"weights": _digest(parameters), "losses": names.get("losses")}
    found["log"] = getattr(getattr(trainer, "state", None), "log_history", None)
    gact = names.get("gact")
    if gact is None and trainer is not None:
        callbacks = getattr(trainer, "callbacks", None) or trainer.callback_handler.callbacks
        gact = next((callback.gact for callback in callbacks if hasattr(callback, "gact")), None)
    if gact is not None:
        report = gact.report()
        found |= {"ratio": report.ratio, "retained_bytes": report.retained_bytes, "plan": gact.plan}
        found["adapted_at"] = [entry["step"] for entry in gact.history if entry.get("tensors")]
        found["adaptations"] = len(found["adapted_at"])
    return found


def _model_of(trainer: Any) -> Any:
    return trainer.lightning_module if hasattr(trainer, "lightning_module") else trainer.model


def _digest(parameters: list[Any]) -> str:
    gathered: Any = nullcontext()
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        gathered = sys.modules["deepspeed"].zero.GatheredParameters(parameters)
    with gathered:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        return hashlib.sha256(b"".join(p.detach().float().cpu().numpy().tobytes() for p in whole)).hexdigest()


def _main(name: str, folder: str, levels: str, *arguments: str) -> None:
    """On a rank."""
    import torch
    import torch.distributed as dist

    init, destroy = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = lambda *args, **options: None if dist.is_initialized() else init(*args, **options)
    dist.destroy_process_group = lambda *_: None  # the next run uses the same
    results = {}
    script = EXAMPLES / name
    for level in json.loads(levels):
        out = Path(folder) / level
        out.mkdir(parents=True, exist_ok=True)
        sys.argv = [str(script), *(argument.replace("{out}", str(out)) for argument in arguments)]
        names: dict[str, Any] = {"__name__": "__main__"}
        torch.manual_seed(0)
        exec(compile(_at_level(script.read_text(), level), str(script), "exec"), names)
        results[level] = _found(names)
        names.clear()
        gc.collect()  # gloo aborts the process when a reducer outlives its group
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    destroy()


if __name__ == "__main__":
    _main(*sys.argv[1:])
