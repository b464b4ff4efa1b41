"""A bar on a terminal for work that takes a while; nothing where there is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24  # characters of the bar
_QUIET = 0.5  # seconds: what takes less needs none
_BETWEEN = 0.1  # seconds between two drawings
_ERASE = "\r\x1b[K"  # to the beginning of the line, and clear it


class Progress:
    """Counts towards a total. Drawn on `stream`, stderr by default, so that it mixes with no output."""

    def __init__(
        self,
        what: str,
        total: float,
        unit: str,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._began = clock()
        self._shown = self._began + _QUIET - _BETWEEN
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._show(_ERASE)

    def reach(self, done: float) -> None:
        """So much is done."""
        now = self._clock()
        if not self._terminal or now - self._shown < _BETWEEN:
            return
        self._shown, self._drawn = now, True
        part = min(1.0, done / self._total) if self._total else 1.0
        full = round(_WIDTH * part)
        line = (
            f"{self._what} [{'#' * full}{'-' * (_WIDTH - full)}] {done:.0f} of {self._total:.0f} {self._unit}"
        )
        if 0 < part < 1:
            left = round((now - self._began) * (1 - part) / part)
            line += f", {left // 60}:{left % 60:02d} left"
        self._show(_ERASE + line[: shutil.get_terminal_size().columns - 1])

    def _show(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
