"""One thread at a time steps: names, plans and accounts of a step have one place."""

import logging
import threading

_log = logging.getLogger(__name__)


class OneThread:
    """Lets one thread in at a time, and the same thread again while it is in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread, self._depth = threading.current_thread(), 0
        self._warned = False

    def enter(self) -> bool:
        """Whether this thread may step; if so, leave() has to follow."""
        with self._lock:
            if not self.may_enter():
                return False
            mine = self._thread is threading.current_thread()
            self._thread, self._depth = threading.current_thread(), self._depth + 1 if mine else 1
            return True

    def leave(self) -> None:
        """What enter() allowed is over."""
        with self._lock:
            self._depth -= 1

    def may_enter(self) -> bool:
        """Whether no other thread is in; one warning if there is one."""
        may = self._depth == 0 or self._thread is threading.current_thread() or not self._thread.is_alive()
        if not may and not self._warned:
            self._warned = True
            _log.warning(
                "a step began in one thread while another thread was in one of the same controller: what it saves is "
                "stored exactly; let threads take turns, or give each a model and a controller of its own"
            )
        return may
