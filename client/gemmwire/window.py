"""Many requests from one thread, several under way at a time, each by a connection of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from .deadline import Deadline
from .errors import GemmwireError, WireError
from .failures import transport_error
from .http1 import Reply, Request

if TYPE_CHECKING:
    from .transport import HTTPTransport, Sent

Told = Callable[["Reply | GemmwireError"], None]


class Window:
    """At most `size` requests under way; `timeout` (seconds) is for all that pass through.

    The oldest is read first, so that the answers come in the order of the requests; the others wait in the
    memory of their sockets. A request that fails has its error in the place of its reply.
    """

    def __init__(self, timeout: float | None, size: int) -> None:
        self._timeout = timeout
        self._deadline = Deadline(timeout)
        self._size = size
        self._under_way: deque[tuple[HTTPTransport, Sent | GemmwireError, Told | None]] = deque()
        self._replies: list[Reply | GemmwireError] = []

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        """What is still under way is given up."""
        while self._under_way:
            transport, sent, _told = self._under_way.popleft()
            if not isinstance(sent, GemmwireError):
                sent.connection.close()
                transport.pool.release()

    def add(self, request: Request, transport: HTTPTransport, told: Told | None = None) -> None:
        """Send a request, after reading the oldest answers where there is no room for it. `told` is called
        with what came of it."""
        slot = len(self._under_way) < self._size and transport.pool.acquire_now()
        # Never wait for a slot while holding others: two threads that do would wait for each other.
        while not slot and self._under_way:
            self._finish_oldest()
            slot = transport.pool.acquire_now()
        sent = self._start(request, transport, slot)
        if told is not None and isinstance(sent, GemmwireError):
            told(sent)  # before the next one is sent the same way
            told = None
        self._under_way.append((transport, sent, told))

    def replies(self) -> list[Reply | GemmwireError]:
        """All of them, in order."""
        while self._under_way:
            self._finish_oldest()
        return self._replies

    def _start(self, request: Request, transport: HTTPTransport, slot: bool) -> Sent | GemmwireError:
        try:
            if not slot:
                transport.pool.acquire(self._deadline)
            try:
                return transport.start(request, self._deadline)
            except BaseException:
                transport.pool.release()
                raise
        except OSError as error:
            return transport_error(error, request, transport.url, self._timeout)

    def _finish_oldest(self) -> None:
        transport, sent, told = self._under_way.popleft()
        outcome = sent if isinstance(sent, GemmwireError) else self._finish(transport, sent)
        self._replies.append(outcome)
        if told is not None:
            told(outcome)

    def _finish(self, transport: HTTPTransport, sent: Sent) -> Reply | GemmwireError:
        try:
            return transport.finish(sent, self._deadline)
        except WireError as error:
            return error
        except OSError as error:
            return transport_error(error, sent.request, transport.url, self._timeout)
        finally:
            transport.pool.release()
