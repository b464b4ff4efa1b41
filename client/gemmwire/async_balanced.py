"""What `balanced` is for threads, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .async_transport import AsyncHTTPTransport
from .balanced import CONNECT_S
from .balancer import Balancer
from .errors import GemmwireError
from .http1 import Reply, Request
from .rounds import Round, addressed
from .tls import contexts_for
from .url import Url

if TYPE_CHECKING:
    import ssl

    from .tls import TLS


class AsyncBalanced:
    """At most `max_connections` to each server, for the tasks of one loop. `each` has a transport of each."""

    def __init__(
        self, urls: Sequence[Url], max_connections: int, tls: TLS | ssl.SSLContext | None = None
    ) -> None:
        self._urls = urls
        self._balancer = Balancer(len(urls))
        self._transports = [
            AsyncHTTPTransport(url, max_connections, context, CONNECT_S)
            for url, context in zip(urls, contexts_for(urls, tls), strict=True)
        ]
        self.each = {
            str(url): AsyncAddressed(one, url) for url, one in zip(urls, self._transports, strict=True)
        }

    async def send(self, request: Request, timeout: float | None) -> Reply:
        round_ = Round(self._balancer, self._urls, request, timeout)
        try:
            while (attempt := round_.advance()) is not None:
                try:
                    reply = await self._transports[attempt.host].send(attempt.request, attempt.timeout)
                except GemmwireError as error:
                    round_.settle(error)
                else:
                    round_.settle(reply)
        finally:
            round_.abandon()
        return round_.result()

    async def close(self) -> None:
        await asyncio.gather(*(transport.close() for transport in self._transports))


class AsyncAddressed:
    """The transport of one of several servers, for requests that name none."""

    def __init__(self, transport: AsyncHTTPTransport, url: Url) -> None:
        self._transport = transport
        self._url = url

    async def send(self, request: Request, timeout: float | None) -> Reply:
        return await self._transport.send(addressed(request, self._url), timeout)

    async def close(self) -> None:
        await self._transport.close()
