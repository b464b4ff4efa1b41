"""The connections of one client that are open, shared by the tasks of one event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from .async_connection import AsyncConnection
from .deadline import Deadline
from .errors import InvalidArgument
from .failures import Busy, ClientClosed

_CLOSING_S = 1.0


class AsyncPool:
    """Idle connections, the one used last first, and a slot for each that may be open."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._idle: list[AsyncConnection] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def acquire(self, deadline: Deadline) -> None:
        """Wait for a slot, in order of arrival. Errors: ClientClosed, Busy, `InvalidArgument`."""
        if self._closed:
            raise ClientClosed
        self._bind(asyncio.get_running_loop())
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await self._wait(turn, deadline)
        except BaseException:
            if turn.done():
                self.release()  # it was given a slot in the moment in which it was cancelled, or closed
            else:
                self._waiting.remove(turn)
            raise

    async def _wait(self, turn: asyncio.Future[None], deadline: Deadline) -> None:
        left = deadline.left()
        await asyncio.wait([turn], timeout=left)
        if not turn.done():
            raise Busy(self._size)
        if self._closed:
            raise ClientClosed

    def release(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._free += 1

    def take(self) -> AsyncConnection | None:
        """An idle connection that the server has not closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_idle():
                return connection
            connection.close()
        return None

    def put(self, connection: AsyncConnection) -> None:
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        """Close what is idle, and wait until it is."""
        self._closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if idle and self._loop is asyncio.get_running_loop():
            await asyncio.wait([connection.lost for connection in idle], timeout=_CLOSING_S)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connections belong to a loop. One that has ended takes them with it: the next begins with none."""
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise InvalidArgument(
                "This AsyncClient is used by another event loop that is still there; make one for each loop"
            )
        self._loop = loop
        self._free = self._size
        self._idle.clear()
        self._waiting.clear()
