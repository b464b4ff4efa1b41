"""When a call has waited long enough."""

from __future__ import annotations

import time


class Deadline:
    """A point in time for everything that one call waits for; `seconds` None is never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def at_most(self, seconds: float) -> Deadline:
        """The earlier of this one and that of so many seconds from now."""
        sooner = Deadline(seconds)
        return self if self._end is not None and self._end <= time.monotonic() + seconds else sooner

    def left(self) -> float | None:
        """Seconds until then, as a socket's timeout. Errors: TimeoutError."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left
