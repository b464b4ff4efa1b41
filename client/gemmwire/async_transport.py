"""What `transport` is for threads, on an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from .async_connection import AsyncConnection
from .async_pool import AsyncPool
from .deadline import Deadline
from .failures import too_slow, transport_error
from .http1 import Reply, Request
from .incoming import Closed
from .url import Url

if TYPE_CHECKING:
    import ssl


class AsyncTransport(Protocol):
    async def send(self, request: Request, timeout: float | None) -> Reply:
        """The reply, whatever its status; `timeout` in seconds for all of it. Errors: `TransportError`,
        `WireError`."""
        ...

    async def close(self) -> None: ...


class AsyncHTTPTransport:
    """Keep-alive connections to one server, at most `max_connections` at a time, for the tasks of one loop.

    A connection that the server closed between two requests is replaced, once a call, by a fresh one. What
    must not be repeated goes over a fresh one at once. `connect_s`: seconds that one may take to be made.
    """

    def __init__(
        self,
        url: Url,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
        connect_s: float | None = None,
    ) -> None:
        self._url = url
        self._pool = AsyncPool(max_connections)
        self._tls = tls
        self._connect_s = connect_s

    async def send(self, request: Request, timeout: float | None) -> Reply:
        deadline = Deadline(timeout)
        try:
            await self._pool.acquire(deadline)
            try:
                return await self._send(request, deadline)
            finally:
                self._pool.release()
        except OSError as error:  # TimeoutError is one
            raise transport_error(error, request, self._url, timeout) from error

    async def close(self) -> None:
        await self._pool.close()

    async def _send(self, request: Request, deadline: Deadline) -> Reply:
        idle = self._pool.take()
        if idle is not None and not request.repeatable:
            idle.close()
        elif idle is not None:
            try:
                return await self._exchange(idle, request, deadline)
            except Closed:
                pass  # between the look at it and the request
        return await self._exchange(await self._connect(deadline), request, deadline)

    async def _exchange(self, connection: AsyncConnection, request: Request, deadline: Deadline) -> Reply:
        try:
            reply = await connection.exchange(request, deadline)
        except BaseException:  # a cancelled task leaves an answer behind that nobody waits for
            connection.close()
            raise
        self._pool.put(connection)
        return reply

    async def _connect(self, deadline: Deadline) -> AsyncConnection:
        left = deadline.left() if self._connect_s is None else deadline.part(self._connect_s)
        connecting = asyncio.ensure_future(self._connecting())
        try:
            # Up to Python 3.11 wait_for forgets a cancellation that comes together with the connection.
            await asyncio.wait([connecting], timeout=left)
            if not connecting.done():
                deadline.left()
                raise TimeoutError if self._connect_s is None or left is None else too_slow(left)
        except BaseException:
            connecting.cancel()
            connecting.add_done_callback(_close)
            raise
        return connecting.result()[1]

    async def _connecting(self) -> tuple[asyncio.BaseTransport, AsyncConnection]:
        loop = asyncio.get_running_loop()
        if self._url.socket:
            return await loop.create_unix_connection(AsyncConnection, self._url.socket)
        return await loop.create_connection(
            AsyncConnection,
            self._url.host,
            self._url.port,
            ssl=self._tls,
            server_hostname=None if self._tls is None else self._url.host,
        )


def _close(connecting: asyncio.Future[tuple[asyncio.BaseTransport, AsyncConnection]]) -> None:
    """A connection that came too late for its call."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result()[1].close()
