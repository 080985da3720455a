"""What every rank finds alike is said by rank 0."""

from __future__ import annotations

import logging

from .collectives import rank

_said: set[tuple[str, str]] = set()


def say(log: logging.Logger, message: str, *arguments: object, level: int = logging.WARNING) -> None:
    """Log what every rank finds.

    level: on rank 0. Elsewhere it is DEBUG: a stage of a pipeline, or a rank with data of its own, may alone find it.
    """
    log.log(level if rank() == 0 else logging.DEBUG, message, *arguments)


def say_once(
    log: logging.Logger, message: str, *arguments: object, level: int = logging.WARNING, on_its_rank: bool = False
) -> None:
    """say() what may be found again and again, as in each adaptation: the first time it has this text.

    on_its_rank: what one rank alone may find is said by each that does.
    """
    text = message % arguments
    if (log.name, text) not in _said:
        _said.add((log.name, text))
        if on_its_rank:
            log.log(level, text)
        else:
            say(log, "%s", text, level=level)
