"""How long a connection's client may let it rest, and how slow it may be on the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """Between two requests `idle_s`; in the middle of a request or of an answer `stall_s` without a byte, and
    in all `stall_s` and what its bytes take at `bytes_per_s`: one that trickles is cut off too."""

    idle_s: float
    stall_s: float
    bytes_per_s: int

    def allowed(self, nbytes: int) -> float:
        return self.stall_s + nbytes / self.bytes_per_s


class Watch:
    """What one connection's client has been seen to do. Times are those of the event loop, in seconds."""

    __slots__ = ("_patience", "_read_from", "_read_since", "_unread", "active")

    def __init__(self, patience: Patience, now: float) -> None:
        self.active = now  # when bytes last came or went
        self._patience = patience
        self._unread = 0
        self._read_from = 0  # bytes of the answer, when it was first seen to be unread
        self._read_since = now

    def idle(self, now: float) -> float:
        """Seconds left of a connection between two requests."""
        return self.active + self._patience.idle_s - now

    def reading(self, now: float, unread: int) -> float:
        """Seconds left to a client with so many bytes of answers to read; to be asked with 0 too."""
        if unread > self._unread or not unread:
            self._read_from, self._read_since = unread, now
        if unread != self._unread:
            self._unread, self.active = unread, now
        if not unread:
            return math.inf
        whole = self._read_since + self._patience.allowed(self._read_from)
        return min(self.active + self._patience.stall_s, whole) - now

    def sending(self, now: float, began: float, received: int) -> float:
        """Seconds left to a client in the middle of a request, of whose body so much has come."""
        whole = began + self._patience.allowed(received)
        return min(self.active + self._patience.stall_s, whole) - now
