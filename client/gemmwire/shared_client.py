"""A client whose tensors lie in memory that it shares with the server."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, TypeVar

from . import arguments, replies, wire
from .base import Exchange
from .client import Client
from .errors import GemmwireError, ServerError, TimedOut, WireError
from .facts import Answer
from .http1 import Reply, Request
from .replies import OUTPUT, Sent, columns_of
from .shm import Idle, Region, places, refuse_elsewhere
from .url import segment

T = TypeVar("T")

_STALE = frozenset({"region_unknown", "region_gone", "region_range"})
_ROOT = "/v2/systemsharedmemory/region/"


class SharedClient(Client):
    """As the client that it was made by (`Client.shared`), by whose connections it calls: where x and y
    together have `at_least` bytes, they are passed in shared memory, else in the body, which is then quicker.

    Each call that is under way has memory of its own, which is kept for the next.
    """

    def __init__(self, client: Client, prefix: str, at_least: int) -> None:
        refuse_elsewhere()
        vars(self).update(vars(client))  # its address, headers and connections
        self._prefix = prefix
        self._at_least = at_least
        self._idle = Idle()
        self._widths: dict[str, Mapping[str, int]] = {}

    def infer_many(
        self,
        calls: Iterable[tuple[str, Any]],
        *,
        output_dtype: object = None,
        timeout: float | None = None,
        quantize: str | None = None,
        at_once: int = 8,
    ) -> list[Any]:
        """As `Client.infer_many`, `at_once` calls after the other, so that no more have memory."""
        waiting, done = arguments.calls_of(calls), list[Any]()
        seconds = self._seconds(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        while some := list(islice(waiting, arguments.whole(at_once, "at_once"))):
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimedOut(f"{len(done)} calls were answered within {seconds:g} s, and some were not")
            for attempt in (1, 2):
                try:
                    done += super().infer_many(
                        some, output_dtype=output_dtype, timeout=left, quantize=quantize, at_once=at_once
                    )
                    break
                except ServerError as error:
                    if attempt == 2 or error.code not in _STALE:
                        raise
        return done

    def close(self) -> None:
        """Give the memory back; the client that this one was made by is still open."""
        for region in self._idle.clear():
            self._give_up(region)

    def take(self, nbytes: int) -> Region:
        """A region that is registered. Errors: as of any call; `InvalidArgument`."""
        region = self._idle.take(nbytes)
        if region is None:
            region = Region(self._prefix, nbytes)
            try:
                self._run(self._registration(region))
            finally:
                region.unlink()
        return region

    def put(self, region: Region) -> None:
        self._idle.put(region)

    def forget(self) -> None:
        """The server does not know the regions, or has other layers: it is another one."""
        self._idle.clear()
        self._widths.clear()

    def width(self, layer: str, output: str) -> int:
        """Columns of an output. Errors: as `Client.layer`; `WireError`."""
        widths = self._widths.get(layer)
        if widths is None:
            widths = self._widths[layer] = _widths(self, layer)
        if output not in widths:
            raise WireError(
                "output_unknown", f"Layer {layer!r} has no output {output!r}; it has {', '.join(widths)}"
            )
        return widths[output]

    def _exchange(
        self, layer: str, path: str, message: wire.InferRequest, sent: Sent, timeout: float | None
    ) -> Exchange[Answer]:
        shared = _SharedCall(self, layer, path, message, sent)
        if shared.nbytes < self._at_least:
            return super()._exchange(layer, path, message, sent, timeout)
        return _SharedExchange(shared.request, timeout, shared.read, shared=shared)

    def _run(self, exchange: Exchange[T]) -> T:
        try:
            try:
                return super()._run(exchange)
            except ServerError as error:
                if error.code not in _STALE:
                    raise
            return super()._run(exchange)
        finally:
            if isinstance(exchange, _SharedExchange) and exchange.shared is not None:
                exchange.shared.drop()

    def _registration(self, region: Region) -> Exchange[None]:
        body = b'{"key":"%s","offset":0,"byte_size":%d,"held":true}' % (region.key.encode(), region.nbytes)
        return self._post(f"{_ROOT}{segment(region.name, 'region')}/register", body)

    def _give_up(self, region: Region) -> None:
        with suppress(GemmwireError):  # else it misses the lock soon
            self._run(self._post(f"{_ROOT}{segment(region.name, 'region')}/unregister", b""))
        region.close()

    def _post(self, path: str, body: bytes) -> Exchange[None]:
        request = self._request("POST", path, {"content-type": "application/json"}, [body])
        return Exchange(lambda _: request, self._timeout, replies.read_nothing, retried=False)


@dataclass(frozen=True)
class _SharedExchange(Exchange[Answer]):
    shared: _SharedCall | None = None


class _SharedCall:
    """One call's way through shared memory. The region of an attempt that had no answer is used no more: the
    server may still write to it."""

    def __init__(
        self, client: SharedClient, layer: str, path: str, message: wire.InferRequest, sent: Sent
    ) -> None:
        self._client, self._layer, self._path = client, layer, path
        self._message, self._sent = message, sent
        self._region: Region | None = None
        self._places: set[wire.Shared] = set()  # of its outputs
        rows = prod(sent.shape[:-1]) * wire.ITEMSIZE[sent.datatype]
        self._inputs = [wire.buffers_size([tensor.data]) for tensor in message.inputs]
        self._outputs = [rows * client.width(layer, name) for name in sent.outputs]

    def drop(self) -> None:
        """Let go of the memory of an attempt that had no answer."""
        if self._region is not None:
            self._region.close()
            self._region = None

    @property
    def nbytes(self) -> int:
        return sum(self._inputs) + sum(self._outputs)

    def request(self, timeout: float | None) -> Request:
        self.drop()
        offsets, size = places(self._inputs + self._outputs)
        region = self._region = self._client.take(size)
        message, count = self._message, len(self._inputs)
        inputs = tuple(
            tensor._replace(data=b"", shared=region.put(tensor.data, offset))
            for tensor, offset in zip(message.inputs, offsets[:count], strict=True)
        )
        outputs = tuple(
            replace(output, binary=None, shared=region.place(offset, nbytes))
            for output, offset, nbytes in zip(
                message.outputs or (), offsets[count:], self._outputs, strict=True
            )
        )
        self._places = {output.shared for output in outputs if output.shared is not None}
        message = replace(message, inputs=inputs, outputs=outputs)
        return self._client._infer_request(self._path, message, timeout)

    def read(self, reply: Reply) -> Answer:
        region, self._region = self._region, None
        if region is None:
            raise WireError("answer_invalid", "An answer came to a request that was not sent")

        def taken(place: wire.Shared) -> wire.Buffer:
            if place not in self._places:
                raise WireError(
                    "answer_invalid", f"The server's answer is at {place}, which was not asked for"
                )
            return region.get(place)

        try:
            answer = replies.read_answer(reply, replace(self._sent, taken=taken))
        except ServerError as error:
            if error.code in _STALE:
                self._client.forget()
                raise
            self._client.put(region)
            raise
        self._client.put(region)
        return answer


def _widths(client: Client, layer: str) -> Mapping[str, int]:
    info = client.layer(layer)
    return {OUTPUT: info.n} | {name: stop - start for name, (start, stop) in columns_of(info).items()}
