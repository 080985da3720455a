"""Real ranks for tests: processes with a gloo process group that stay alive between tests.

    from ranks import count_collectives, run_ranks

    def doubled(value):                                  # module level: it travels by its name
        return 2 * value + torch.distributed.get_rank()

    def test_doubled(ranks):                             # the fixture hands out run_ranks itself
        assert ranks(doubled, 3, world_size=2) == [6, 7]

There is one pool of ranks for each world size, and it is reused. A rank that raises, dies or exceeds the timeout costs
its pool: the next call starts a fresh one, because a collective that only some ranks have entered cannot be taken back.
Ranks are forked from two servers that have imported the large libraries once, since importing takes seconds.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT_S = 120.0
START_TIMEOUT_S = 180.0
# A rank whose peer has failed is most likely stuck in a collective; one that fails too does so soon.
GRACE_AFTER_FAILURE_S = 5.0
# gact_dist is not among them: what it does when it is imported belongs to the tests.
PRELOADED = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "deepspeed.runtime.pipe.module",
]


class RankError(RuntimeError):
    """A rank died, timed out, or raised something that could not be sent back as it was."""


@dataclass(frozen=True)
class _Reply:
    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def run_ranks(
    function: Callable[..., Any], *args: Any, world_size: int = 2, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Call ``function(*args)`` on each of ``world_size`` ranks and return their values in rank order.

    ``function`` and ``args`` travel by pickle, so the function lives at the top of a module and tensors are copied.
    Every call starts with the same torch seed on all ranks, one thread a rank, and an initialised gloo group. The
    exception of the lowest rank that raised is raised here, with that rank's traceback as its cause; RankError when
    a rank died or ``timeout_s`` seconds passed.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.run(function, args, timeout_s)
    except BaseException:
        pool.kill()
        del _pools[world_size]
        raise


def close_pools() -> None:
    """End all ranks; they destroy their process groups first. A later run_ranks starts new ones."""
    while _pools:
        _, pool = _pools.popitem()
        pool.close()


@dataclass
class CollectiveCount:
    """Number of collectives issued inside count_collectives; up to date once the block has been left."""

    total: int = 0


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count the collectives this rank issues inside the block, over all its process groups.

    Reads the sequence number that each process group keeps for itself, so nothing is wrapped and the job under test
    runs untouched; collectives that DDP's reducer and FSDP issue from C++ are seen as well as those from Python,
    send and recv count one each, all_gather_object counts two. Not seen: groups destroyed inside the block, and
    communication that bypasses c10d (the store, DeepSpeed's shared-memory op).
    """
    count = CollectiveCount()
    before = _sequence_numbers()
    try:
        yield count
    finally:
        after = _sequence_numbers()
        count.total = sum(number - before.get(name, 0) for name, number in after.items())


def _sequence_numbers() -> dict[str, int]:
    groups = dist.distributed_c10d._world.pg_names
    return {name: group._get_sequence_number_for_group() for group, name in groups.items()}


@cache
def _server(parity: int) -> forkserver.ForkServer:
    """One of the processes from which ranks are forked.

    Strings hash differently in each, as they do on the ranks of a real job: ranks that iterate over the same set must
    not agree by chance.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1"):  # a fork must not lose a library's threads
        server.ensure_running()
    return server


class _Pool:
    """``world_size`` processes, one pipe each."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # daemon: multiprocessing ends the process when the test run exits without close_pools
            process = context.Process(
                target=_serve, args=(theirs, rank, world_size, f"{self._folder.name}/store"), daemon=True
            )
            with patch.object(forkserver, "connect_to_new_process", _server(rank % 2).connect_to_new_process):
                process.start()
            theirs.close()  # so that a dead rank reads as end of file here
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._collect(START_TIMEOUT_S, "starting")
        except BaseException:
            self.kill()
            raise

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        # pytest extends sys.path while it collects, after the pool may have started
        task = pickle.dumps((list(sys.path), pickle.dumps((function, args))))
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(task)
            except OSError as error:
                raise RankError(f"rank {rank} had ended before the call (it crashed after the last one)") from error
        return self._collect(timeout_s, getattr(function, "__qualname__", repr(function)))

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        """One reply from each rank; raises as run_ranks says."""
        replies: dict[int, _Reply] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                replies[rank] = self._receive(rank, connection, what)
                if replies[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        for rank, reply in sorted(replies.items()):
            if reply.error is not None:
                raise reply.error from RankError(f"on rank {rank}:\n{reply.trace}")
        if waiting:
            raise RankError(f"{what}: no answer from ranks {sorted(waiting.values())} within {timeout_s:g} s")
        return [replies[rank].value for rank in range(len(self._connections))]

    def _receive(self, rank: int, connection: Connection, what: str) -> _Reply:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(GRACE_AFTER_FAILURE_S)
            return _Reply(error=RankError(f"{what}: rank {rank} died with exit code {process.exitcode}"))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()  # a rank that reads end of file leaves its loop and cleans up
        for process in self._processes:
            process.join(GRACE_AFTER_FAILURE_S)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._folder.cleanup()


def _serve(connection: Connection, rank: int, world_size: int, store: str) -> None:
    """A rank's life: one process group, then one task after the other until the pipe closes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=START_TIMEOUT_S),
    )
    gc.freeze()  # what was imported is not searched after every call
    reply = _Reply()
    while True:
        try:
            connection.send_bytes(_dump(reply))
            task = connection.recv_bytes()
        except (EOFError, OSError):
            break
        reply = _execute(task)
        gc.collect()  # a DDP or FSDP module in a reference cycle would live on into the next test
    del reply
    gc.collect()  # gloo aborts the process when a reducer outlives its group
    dist.destroy_process_group()


def _execute(task: bytes) -> _Reply:
    try:
        sys.path[:], call = pickle.loads(task)
        function, args = pickle.loads(call)
        torch.manual_seed(0)
        return _Reply(value=function(*args))
    except BaseException as error:  # SystemExit and pytest's outcomes too belong to the caller
        return _Reply(error=error, trace=traceback.format_exc())


def _dump(reply: _Reply) -> bytes:
    """Plain pickle: multiprocessing's own would share tensor memory with a process that may be killed."""
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)  # an exception with its own __init__ may pickle and yet not come back
    except Exception as error:  # a class's own __reduce__ may raise anything
        what = repr(reply.value) if reply.error is None else repr(reply.error)
        trace = reply.trace or traceback.format_exc()
        failure = RankError(f"cannot be sent between processes ({type(error).__name__}: {error}): {what}")
        data = pickle.dumps(_Reply(error=failure, trace=trace))
    return data


_pools: dict[int, _Pool] = {}
atexit.register(close_pools)
