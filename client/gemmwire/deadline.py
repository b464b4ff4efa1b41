"""When a call has waited long enough."""

from __future__ import annotations

import time


class Deadline:
    """A point in time for everything that one call waits for; `seconds` None is never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def part(self, seconds: float) -> float:
        """So many seconds, or half of what is left: the rest is for another try. Errors: TimeoutError."""
        left = self.left()
        return seconds if left is None else min(seconds, left / 2)

    def left(self) -> float | None:
        """Seconds until then, as a socket's timeout. Errors: TimeoutError."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
