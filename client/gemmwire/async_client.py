"""The client for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import arguments
from .async_transport import AsyncHTTPTransport, AsyncTransport
from .base import BaseClient, Exchange
from .calls import RETRIED, Call, calls_at
from .errors import GemmwireError, RefitIncomplete
from .everywhere import Everywhere
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .retries import Retries
from .tls import TLS, context_for
from .weights import Weights

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")


class AsyncClient(BaseClient):
    """`Client` with methods to be awaited, for the tasks of one event loop. Arguments and errors are its.

    A task that is cancelled gives up its connection; the server drops what it has not begun.
    """

    def __init__(
        self,
        url: str | Sequence[str] = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        retries: Retries | int = 2,
        quantize: str = "server",
        tls: TLS | ssl.SSLContext | None = None,
        max_connections: int = 64,
        transport: AsyncTransport | None = None,
    ) -> None:
        super().__init__(url, timeout, headers, api_key, retries, quantize)
        size = arguments.whole(max_connections, "max_connections")
        self._transport, self._each = self._transports(size, tls, transport)

    async def infer(
        self,
        layer: str,
        x: Any,
        *,
        output_dtype: object = None,
        version: str | int | None = None,
        min_version: str | int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        quantize: str | None = None,
    ) -> Any:
        """y `[..., N]` of x `[..., K]`: as `Client.infer`."""
        exchange = self._infer(
            layer, x, output_dtype, version, timeout, request_id, quantize, None, min_version
        )
        return (await self._run(exchange)).y

    async def call(
        self,
        layer: str,
        x: Any,
        *,
        output_dtype: object = None,
        version: str | int | None = None,
        min_version: str | int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        quantize: str | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Answer:
        """As `infer`, with what made y: the weights' version, backend, bucket and times.

        `outputs`: names of a fused layer's, `y` or its parts, for `Answer.outputs`, all from one forward.
        """
        exchange = self._infer(
            layer, x, output_dtype, version, timeout, request_id, quantize, outputs, min_version
        )
        return await self._run(exchange)

    async def infer_many(
        self,
        calls: Iterable[tuple[str, Any]],
        *,
        output_dtype: object = None,
        timeout: float | None = None,
        quantize: str | None = None,
        at_once: int = 8,
    ) -> list[Any]:
        """y of each (layer, x), with up to `at_once` requests under way: as `Client.infer_many`.

        Errors: that of the first call to fail for good, with which the others are given up.
        """
        exchanges = [
            self._infer(layer, x, output_dtype, timeout=timeout, quantize=quantize)
            for layer, x in arguments.calls_of(calls)
        ]
        slots = asyncio.Semaphore(arguments.whole(at_once, "at_once"))

        async def one(call: Call[Answer]) -> Any:
            async with slots:
                call.resume()
                return (await self._finish(call, self._transport)).y

        # A call's time begins here, for all of them together.
        tasks = [asyncio.ensure_future(one(Call(exchange, self._retries))) for exchange in exchanges]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @overload
    async def refit(
        self,
        layer: str,
        weight: Any,
        *,
        scale: Any = None,
        bias: Any = None,
        if_version: str | int | None = None,
        timeout: float | None = None,
    ) -> Refitted: ...

    @overload
    async def refit(
        self, layer: Mapping[str, Any], *, timeout: float | None = None
    ) -> dict[str, Refitted]: ...

    async def refit(
        self,
        layer: str | Mapping[str, Any],
        weight: Any = None,
        *,
        scale: Any = None,
        bias: Any = None,
        if_version: str | int | None = None,
        timeout: float | None = None,
    ) -> Refitted | dict[str, Refitted]:
        """Replace the weight of a layer, or of several, on the server: as `Client.refit`."""
        if isinstance(layer, str):
            one = Weights.of(weight, scale, bias)
            return await self._refit_each(layer, self._refit(layer, one, if_version, timeout))
        weights = Weights.read_all(layer, weight=weight, scale=scale, bias=bias, if_version=if_version)
        done: dict[str, Refitted] = {}
        for name, entry in weights.items():
            try:
                done[name] = await self._refit_each(name, self._refit(name, entry, None, timeout))
            except GemmwireError as error:
                raise RefitIncomplete.at(name, done, len(weights), error) from error
        return done

    async def layers(self) -> list[LayerInfo]:
        """The layers that the server has."""
        return await self._run(self._layers())

    async def layer(self, name: str) -> LayerInfo:
        """One layer, with all that the server says of it in `config`. Errors: `NotFound`."""
        return await self._run(self._layer(name))

    async def stats(self, layer: str) -> dict[str, Any]:
        """The layer's counters and times, as in the protocol's statistics extension. Errors: `NotFound`."""
        return await self._run(self._stats(layer))

    async def server(self) -> ServerInfo:
        return await self._run(self._server())

    async def live(self) -> bool:
        """Whether the server works, be it still loading. Errors: `TransportError` where none answers."""
        return await self._run(self._health("live"))

    async def ready(self, *, every: bool = False) -> bool:
        """Whether every layer has been loaded, at one server or at `every` one: as `Client.ready`."""
        if not every:
            return await self._run(self._health("ready"))
        calls = calls_at(self._each, self._health("ready"), self._retries)
        for url, call in calls.items():
            if not await self._finish(call, self._each[url]):
                return False
        return True

    async def close(self) -> None:
        """Close the connections; a call after this is refused."""
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _transports(
        self, size: int, tls: TLS | ssl.SSLContext | None, given: AsyncTransport | None
    ) -> tuple[AsyncTransport, Mapping[str, AsyncTransport]]:
        """That of every call, and by its URL that of each server."""
        self._refuse_one_transport(given)
        if self._several:
            from .async_balanced import AsyncBalanced

            balanced = AsyncBalanced(self._urls, size, tls)
            return balanced, balanced.each
        (url,) = self._urls
        transport = given or AsyncHTTPTransport(url, size, context_for(url, tls))
        return transport, {str(url): transport}

    async def _run(self, exchange: Exchange[T]) -> T:
        return await self._finish(Call(exchange, self._retries), self._transport)

    async def _refit_each(self, layer: str, exchange: Exchange[Refitted]) -> Refitted:
        """At one server after the other, so that the others answer meanwhile."""
        if not self._several:
            return await self._run(exchange)
        everywhere = Everywhere(layer)
        for url, call in calls_at(self._each, exchange, self._retries).items():
            try:
                call.resume()
                everywhere.took(url, await self._finish(call, self._each[url]))
            except GemmwireError as error:
                everywhere.failed(url, error)
        return everywhere.refitted()

    async def _finish(self, call: Call[T], transport: AsyncTransport) -> T:
        while True:
            try:
                return call.read(await transport.send(call.request, call.timeout))
            except RETRIED as error:
                seconds = call.failed(error)
            await asyncio.sleep(seconds)
