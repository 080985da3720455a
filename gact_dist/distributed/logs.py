"""What every rank finds alike is said by rank 0, and once."""

from __future__ import annotations

import logging

from .collectives import rank

_said: set[tuple[str, str]] = set()


def say_once(log: logging.Logger, message: str, *arguments: object, level: int = logging.WARNING) -> None:
    """Log what may be found again and again, as in each adaptation, and by every rank: the first time it has this text.

    level: on rank 0. Elsewhere it is DEBUG: a stage of a pipeline, or a rank with data of its own, may alone find it.
    """
    text = message % arguments
    if (log.name, text) not in _said:
        _said.add((log.name, text))
        log.log(level if rank() == 0 else logging.DEBUG, "%s", text)
