"""The connections of one client that are open, shared by its threads."""

from __future__ import annotations

import threading
import weakref

from . import forks
from .connection import Connection
from .deadline import Deadline
from .failures import Busy, ClientClosed


class Pool:
    """Idle connections, the one used last first, and a slot for each that may be open."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._idle: list[Connection] = []
        self._closed = False
        self._slots = threading.Semaphore(size)
        # A client that is dropped without close() leaves no socket for the garbage collector to warn about.
        weakref.finalize(self, _close_all, self._idle)
        forks.reset_after_fork(self)

    def acquire(self, deadline: Deadline) -> None:
        """Wait for a slot. Errors: ClientClosed, Busy."""
        if self._closed:
            raise ClientClosed
        if not self._slots.acquire(timeout=deadline.left()):
            raise Busy(self._size)
        if self._closed:  # meanwhile
            self._slots.release()
            raise ClientClosed

    def acquire_now(self) -> bool:
        """Take a slot if there is one."""
        return not self._closed and self._slots.acquire(blocking=False)

    def release(self) -> None:
        self._slots.release()

    def take(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if connection.is_idle():
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            _close_all(self._idle)

    def close(self) -> None:
        self._closed = True
        _close_all(self._idle)

    def reset_after_fork(self) -> None:
        """The child has its own slots, and leaves the parent's connections to the parent."""
        self._slots = threading.Semaphore(self._size)
        _close_all(self._idle)


def _close_all(idle: list[Connection]) -> None:
    while idle:
        try:
            idle.pop().close()
        except IndexError:  # another thread was faster
            return
