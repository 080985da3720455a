"""Runs scripts on two ranks as torchrun does, without paying for imports each time.

    output = run_script(EXAMPLES / "train_gpt.py", "--out", folder)

torchrun's own agent starts the ranks and gives them their environment. It forks them from a server process that has
imported the large libraries once, since importing takes longer than what the scripts do.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

WORLD_SIZE = 2
TIMEOUT_S = 120
# gact_dist is not among them: a script that does not use it must not find it imported.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "deepspeed",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "trl.trainer.sft_trainer",
    "peft",
    "lightning.pytorch",
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}


class ScriptError(RuntimeError):
    """A rank failed; the message is the output of all ranks."""


def run_script(script: Path | str, *arguments: Path | str) -> str:
    """Run a script (or a module, by its dotted name) on two ranks to its end. Returns the output of rank 0.

    Raises `ScriptError` if a rank fails or takes longer than TIMEOUT_S.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="script-") as folder, _environment(), _signal_handlers():
        launch = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=WORLD_SIZE,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                start_method="forkserver",
                monitor_interval=0.1,
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
            ),
            _run,
        )
        try:
            launch(str(script), [str(argument) for argument in arguments])
        except ChildFailedError as error:
            raise ScriptError("\n".join(_outputs(folder, "*", "std*"))) from error
        return "\n".join(_outputs(folder, "0", "stdout"))


def _run(script: str, arguments: list[str]) -> None:
    """On a rank."""
    signal.alarm(TIMEOUT_S)
    multiprocessing.set_start_method(None, force=True)  # the script's own processes start as they would without us
    sys.argv = [script, *arguments]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__")


def _outputs(folder: str, rank: str, stream: str) -> list[str]:
    return [path.read_text() for path in sorted(Path(folder).glob(f"*/attempt_0/{rank}/{stream}.log"))]


@contextmanager
def _environment() -> Iterator[None]:
    """What the server and its ranks inherit."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore the handlers that the agent replaces."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
