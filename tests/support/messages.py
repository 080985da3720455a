"""What the package logs while a job runs, on this rank."""

from __future__ import annotations

import logging


class Messages(logging.Handler):
    """Collects messages of a level and above within its context."""

    def __init__(self, level: int = logging.WARNING, of: str | None = None) -> None:
        """of: the one logger whose messages count; None for all of the package."""
        super().__init__(level)
        self._of, self._logger = of, logging.getLogger("gact_dist")
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._of in (None, record.name):
            self.texts.append(record.getMessage())

    def __enter__(self) -> Messages:
        self._level_before = self._logger.level
        self._logger.addHandler(self)
        self._logger.setLevel(min(self.level, logging.WARNING))
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
