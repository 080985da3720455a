"""What ends a command early: Ctrl-C, or SIGTERM, which schedulers, containers and `timeout` send."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_FROM_A_SIGNAL = 128
"""what a shell adds to the number of a signal to make an exit code of it"""


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whatever catches an interrupt catches this; only the exit code differs."""


def exit_code_of(stopped: KeyboardInterrupt) -> int:
    """130 for Ctrl-C, 143 for SIGTERM."""
    return _FROM_A_SIGNAL + (signal.SIGTERM if isinstance(stopped, Terminated) else signal.SIGINT)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise Terminated where SIGTERM would end this process at once, without what it has found and with its children.

    Not where whoever started the process wants SIGTERM handled otherwise.
    """
    usual = signal.getsignal(signal.SIGTERM)
    if usual is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _raise_in(os.getpid()))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _raise_in(process: int) -> Callable[[int, FrameType | None], None]:
    def stop(number: int, _: FrameType | None) -> None:
        if os.getpid() == process:
            raise Terminated
        signal.signal(number, signal.SIG_DFL)  # a fork of ours, such as a worker of a DataLoader, ends as it would
        os.kill(os.getpid(), number)

    return stop
