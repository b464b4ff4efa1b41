"""What is done of a known amount of work: a bar on a terminal, now and then a plain line elsewhere.

with Progress("loading", nbytes, layers) as progress:
    progress.add("model.layers.0.mlp.up_proj", nbytes=65536, layers=1)
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

_WIDTH = 24  # characters of the bar
_BETWEEN = 0.1  # seconds between two drawings
_QUIET = 2.0  # seconds between two lines: what takes less needs none
_UNITS = ("B", "kB", "MB", "GB", "TB")
_ERASE = "\r\x1b[K"  # to the beginning of the line, and clear it


class Progress:
    """Counts bytes and layers towards totals that are known at the start. One thread.

    stream: where a bar is drawn if it is a terminal, stderr by default. write: what takes a plain line where
    it is none, at most one for each tenth; by default it goes to the stream. clock: monotonic seconds.
    What is logged in the meantime takes the place of the bar, which is drawn again below it.
    """

    def __init__(
        self,
        what: str,
        nbytes: int,
        layers: int,
        *,
        stream: TextIO | None = None,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._nbytes, self._layers = what, nbytes, layers
        self._stream = sys.stderr if stream is None else stream
        self._write = write or (lambda line: print(line, file=self._stream, flush=True))
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._done_bytes = self._done_layers = 0
        self._began = self._shown = clock()
        self._tenth = 0
        self._handlers = logging.getLogger().handlers[:] if self._terminal else []

    def __enter__(self) -> Progress:
        for handler in self._handlers:
            handler.addFilter(self._make_way)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler in self._handlers:
            handler.removeFilter(self._make_way)
        if self._terminal:
            self._show(_ERASE)

    def add(self, name: str, nbytes: int, layers: int = 0) -> None:
        """So much more is done; `name` is what was worked on."""
        self._done_bytes += nbytes
        self._done_layers += layers
        if self._terminal:
            self._draw(name)
        else:
            self._tell()

    def _draw(self, name: str) -> None:
        now = self._clock()
        if now - self._shown < _BETWEEN:
            return
        self._shown = now
        full = round(_WIDTH * self._fraction())
        line = f"{self._what} [{'#' * full}{'-' * (_WIDTH - full)}] {self._amount()}{self._left(now)}  {name}"
        self._show(_ERASE + line[: shutil.get_terminal_size().columns - 1])

    def _show(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _make_way(self, record: logging.LogRecord) -> bool:
        self._show(_ERASE)
        return True

    def _tell(self) -> None:
        tenth, now = int(10 * self._fraction()), self._clock()
        if tenth > self._tenth and now - self._shown >= _QUIET:
            self._tenth, self._shown = tenth, now
            self._write(f"{self._what}: {10 * tenth} %, {self._amount()}{self._left(now)}")

    def _fraction(self) -> float:
        return min(1.0, self._done_bytes / self._nbytes) if self._nbytes else 1.0

    def _amount(self) -> str:
        done = size(self._done_bytes).rjust(8) if self._terminal else size(self._done_bytes)
        return f"{done} of {size(self._nbytes)}, {self._done_layers} of {self._layers} layers"

    def _left(self, now: float) -> str:
        """Speed and time left, once there is something to go by."""
        took = now - self._began
        if took < 1 or not self._done_bytes:
            return ""
        speed = self._done_bytes / took
        seconds = round(max(0, self._nbytes - self._done_bytes) / speed)
        return f", {size(speed)}/s, {seconds // 60}:{seconds % 60:02d} left"


def size(nbytes: float) -> str:
    """A number of bytes in the unit that people read, three digits or so: 12.3 GB."""
    for unit in _UNITS:
        if nbytes < 1000 or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
