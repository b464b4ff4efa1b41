"""Many requests from one thread, several under way at a time, each by a connection of its own."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from .deadline import Deadline
from .errors import GemmwireError, WireError
from .failures import transport_error
from .http1 import Reply, Request

if TYPE_CHECKING:
    from .transport import HTTPTransport, Sent


class Window:
    """At most `size` requests under way; `timeout` (seconds) is for all that pass through.

    The oldest is read first, so that the answers come in the order of the requests; the others wait in the
    memory of their sockets. A request that fails has its error in the place of its reply.
    """

    def __init__(self, transport: HTTPTransport, timeout: float | None, size: int) -> None:
        self._transport = transport
        self._timeout = timeout
        self._deadline = Deadline(timeout)
        self._size = size
        self._under_way: deque[Sent | GemmwireError] = deque()
        self._replies: list[Reply | GemmwireError] = []

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        """What is still under way is given up."""
        while self._under_way:
            sent = self._under_way.popleft()
            if not isinstance(sent, GemmwireError):
                sent.connection.close()
                self._transport.pool.release()

    def add(self, request: Request) -> None:
        """Send a request, after reading the oldest answers where there is no room for it."""
        slot = len(self._under_way) < self._size and self._transport.pool.acquire_now()
        # Never wait for a slot while holding others: two threads that do would wait for each other.
        while not slot and self._under_way:
            self._finish_oldest()
            slot = self._transport.pool.acquire_now()
        self._under_way.append(self._start(request, slot))

    def replies(self) -> list[Reply | GemmwireError]:
        """All of them, in order."""
        while self._under_way:
            self._finish_oldest()
        return self._replies

    def _start(self, request: Request, slot: bool) -> Sent | GemmwireError:
        try:
            if not slot:
                self._transport.pool.acquire(self._deadline)
            try:
                return self._transport.start(request, self._deadline)
            except BaseException:
                self._transport.pool.release()
                raise
        except OSError as error:
            return transport_error(error, request, self._transport.url, self._timeout)

    def _finish_oldest(self) -> None:
        sent = self._under_way.popleft()
        if isinstance(sent, GemmwireError):
            self._replies.append(sent)
            return
        try:
            self._replies.append(self._transport.finish(sent, self._deadline))
        except WireError as error:
            self._replies.append(error)
        except OSError as error:
            failure = transport_error(error, sent.request, self._transport.url, self._timeout)
            self._replies.append(failure)
        finally:
            self._transport.pool.release()
