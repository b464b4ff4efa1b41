"""Bytes of requests and answers that the server holds, wherever they are on their way: one bound for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import QueueFull


class Held:
    """Counted on the event loop. `receiving`: bodies that are coming, as long as they say that they will be;
    `waiting`: requests at the engine, with the answers they will have; `unread`: answers that their clients
    have not taken from the connection yet.
    """

    __slots__ = ("most", "receiving", "unread", "waiting")

    def __init__(self, most: int) -> None:
        self.most = most
        self.receiving = self.waiting = self.unread = 0

    @property
    def total(self) -> int:
        return self.receiving + self.waiting + self.unread

    def fits(self, more: int) -> bool:
        """One alone always does, or what is larger than the bound could never be served."""
        total = self.receiving + self.waiting + self.unread
        return not total or total + more <= self.most

    def refuse(self, more: int) -> None:
        """Errors: QueueFull where `more` bytes do not fit."""
        if not self.fits(more):
            raise QueueFull(
                f"{self.total} bytes of requests and answers are held ({self.receiving} are coming, "
                f"{self.waiting} wait, {self.unread} are not read) and {more} more pass the bound of "
                f"{self.most}; try again later, or raise --max-queue-bytes",
                expected=f"<= {self.most}",
                got=self.total + more,
            )

    @contextmanager
    def coming(self) -> Iterator[Coming]:
        """Of one body, until the block ends."""
        coming = Coming(self)
        try:
            yield coming
        finally:
            self.receiving -= coming.nbytes


class Coming:
    __slots__ = ("_held", "nbytes")

    def __init__(self, held: Held) -> None:
        self._held = held
        self.nbytes = 0

    def grow(self, more: int) -> None:
        """Errors: QueueFull."""
        self._held.refuse(more)
        self._held.receiving += more
        self.nbytes += more
