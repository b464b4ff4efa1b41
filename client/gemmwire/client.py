"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from . import arguments
from .base import BaseClient, Exchange
from .calls import RETRIED, Call, calls_at
from .errors import GemmwireError, RefitIncomplete
from .everywhere import Everywhere
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .http1 import Reply
from .retries import Retries
from .tls import TLS, context_for
from .transport import HTTPTransport, Transport
from .weights import Weights

if TYPE_CHECKING:
    import ssl

    from .shared_client import SharedClient

SHARED_FROM = 256 << 10  # bytes; fewer are as fast in the body

T = TypeVar("T")


class Client(BaseClient):
    """A client of one server, or of several with the same layers, safe to share between threads.

    `url` is http or https, with a path where the server stands behind one, or unix:///path of a socket on
    this host. Of a list of them, each call goes to the server with the fewest bytes outstanding that works,
    and from one that is lost or busy to another. `timeout` (seconds, None: none) is for all that a call waits
    for, its retries included.
    `api_key` and `headers` go with every request. `retries`: how often a call that failed in passing is made
    again, a number or `Retries`. `quantize`: where x is quantized if a call does not say, "client" or
    "server". `tls`: whom https trusts, a `TLS` or an ssl.SSLContext. At most `max_connections` are open at a
    time, to each server; a call beyond them waits for one. `transport` replaces the network, for tests.

    Every method raises a `GemmwireError` and nothing else: `InputError` and `InvalidArgument` before anything
    is sent, `TransportError` where no answer came, `ServerError` for an answer that is an error, `WireError`
    for one that cannot be read.
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
        transport: Transport | None = None,
    ) -> None:
        super().__init__(url, timeout, headers, api_key, retries, quantize)
        size = arguments.whole(max_connections, "max_connections")
        self._transport, self._each = self._transports(size, tls, transport)

    def infer(
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
        """y `[..., N]` = x `[..., K]` @ W.T + b of `layer`, as an array like x.

        x is a NumPy array, a torch tensor or a buffer, of float32, float16 or bfloat16 (the server computes
        from bfloat16); y has x's dtype, or `output_dtype`: "FP32", "FP16", "BF16", or a NumPy or torch dtype.
        `version` asks for these weights and no others, `min_version` for these or newer ones: of several
        servers one may be a moment behind, and the call is tried again then. `timeout` (seconds) replaces the
        client's; the server is told, and drops a request whose time has passed. `request_id` comes back in
        the answer.

        `quantize="client"` sends x in MXFP8, 1.03 bytes an element, for the same answer: worth it where the
        network is slower than the quantizer, which does about 2 GB of bfloat16 a second on a core.
        """
        answer = self.call(
            layer,
            x,
            output_dtype=output_dtype,
            version=version,
            min_version=min_version,
            timeout=timeout,
            request_id=request_id,
            quantize=quantize,
        )
        return answer.y

    def call(
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
        return self._run(exchange)

    def infer_many(
        self,
        calls: Iterable[tuple[str, Any]],
        *,
        output_dtype: object = None,
        timeout: float | None = None,
        quantize: str | None = None,
        at_once: int = 8,
    ) -> list[Any]:
        """`[infer(layer, x) for layer, x in calls]`, with up to `at_once` requests under way at a time.

        Each goes by a connection of its own, from the calling thread. `timeout` (seconds) is for all of them
        together. Errors: that of the first call, in their order, which failed for good.
        """
        seconds = self._seconds(timeout)
        exchanges = [
            self._infer(layer, x, output_dtype, timeout=timeout, quantize=quantize)
            for layer, x in arguments.calls_of(calls)
        ]
        started = [Call(exchange, self._retries) for exchange in exchanges]
        requests = [call.request for call in started]
        size = arguments.whole(at_once, "at_once")
        replies = self._transport.send_all(requests, seconds, size)
        calls_and_replies = zip(started, replies, strict=True)
        return [self._outcome(call, reply, self._transport).y for call, reply in calls_and_replies]

    @overload
    def refit(
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
    def refit(self, layer: Mapping[str, Any], *, timeout: float | None = None) -> dict[str, Refitted]: ...

    def refit(
        self,
        layer: str | Mapping[str, Any],
        weight: Any = None,
        *,
        scale: Any = None,
        bias: Any = None,
        if_version: str | int | None = None,
        timeout: float | None = None,
    ) -> Refitted | dict[str, Refitted]:
        """Replace the weight of a layer on the server, in place and between two forwards.

        `weight` is `[N, K]` of float32, float16 or bfloat16, or E4M3 codes (float8_e4m3fn, or their bytes as
        uint8) with `scale`, E8M0 exponents `[N, ceil(K/32)]` (uint8 or float8_e8m0fnu). `bias` `[N]` is given
        exactly where the layer has one. `if_version` replaces that version and no other, else `Conflict`.

        Given a mapping of layers to weights, each replaces its layer, one after the other; a layer with a
        bias or a scale has a mapping of its own, `{"weight": w, "weight_scale": s, "bias": b}`.
        Errors then: `RefitIncomplete`, once the weights themselves have been found to be right.

        Without `if_version` nothing is sent twice: after a `TransportError` the layer's version tells whether
        it was replaced.
        """
        if isinstance(layer, str):
            one = Weights.of(weight, scale, bias)
            return self._refit_each(layer, self._refit(layer, one, if_version, timeout))
        weights = Weights.read_all(layer, weight=weight, scale=scale, bias=bias, if_version=if_version)
        done: dict[str, Refitted] = {}
        for name, entry in weights.items():
            try:
                done[name] = self._refit_each(name, self._refit(name, entry, None, timeout))
            except GemmwireError as error:
                raise RefitIncomplete.at(name, done, len(weights), error) from error
        return done

    def layers(self) -> list[LayerInfo]:
        """The layers that the server has."""
        return self._run(self._layers())

    def layer(self, name: str) -> LayerInfo:
        """One layer, with all that the server says of it in `config`. Errors: `NotFound`."""
        return self._run(self._layer(name))

    def stats(self, layer: str) -> dict[str, Any]:
        """The layer's counters and times, as in the protocol's statistics extension. Errors: `NotFound`;
        `InvalidArgument` of a client of several servers, each of which counts for itself.
        """
        return self._run(self._stats(layer))

    def server(self) -> ServerInfo:
        return self._run(self._server())

    def live(self) -> bool:
        """Whether the server works, be it still loading. Errors: `TransportError` where none answers."""
        return self._run(self._health("live"))

    def ready(self, *, every: bool = False) -> bool:
        """Whether every layer has been loaded: of several servers, at one of them, which will then answer, or
        at `every` one. Errors: `TransportError` where no server answers, with `every` where one does not.
        """
        if not every:
            return self._run(self._health("ready"))
        calls = calls_at(self._each, self._health("ready"), self._retries)
        return all(self._outcome(call, None, self._each[url]) for url, call in calls.items())

    def shared(self, prefix: str = "gemmwire", *, at_least: int = SHARED_FROM) -> SharedClient:
        """A client of the same server whose tensors are passed in shared memory, where they have `at_least`
        bytes in a call. The server runs on this host, as this user, with --shm-prefix; `prefix` is that.

        Use it in a `with` block, or `close()` it: that gives its memory back, and leaves this client open.
        Errors: `InvalidArgument` on a system without shared memory, and of a client of several servers.
        """
        self._refuse_several("shared memory is")
        from .shared_client import SharedClient

        return SharedClient(self, prefix, at_least)

    def close(self) -> None:
        """Close the connections; a call after this is refused."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _transports(
        self, size: int, tls: TLS | ssl.SSLContext | None, given: Transport | None
    ) -> tuple[Transport, Mapping[str, Transport]]:
        """That of every call, and by its URL that of each server."""
        self._refuse_one_transport(given)
        if self._several:
            from .balanced import Balanced

            balanced = Balanced(self._urls, size, tls)
            return balanced, balanced.each
        (url,) = self._urls
        transport = given or HTTPTransport(url, size, context_for(url, tls))
        return transport, {str(url): transport}

    def _run(self, exchange: Exchange[T]) -> T:
        return self._outcome(Call(exchange, self._retries), None, self._transport)

    def _refit_each(self, layer: str, exchange: Exchange[Refitted]) -> Refitted:
        """At one server after the other, so that the others answer meanwhile."""
        if not self._several:
            return self._run(exchange)
        everywhere = Everywhere(layer)
        for url, call in calls_at(self._each, exchange, self._retries).items():
            try:
                call.resume()
                everywhere.took(url, self._outcome(call, None, self._each[url]))
            except GemmwireError as error:
                everywhere.failed(url, error)
        return everywhere.refitted()

    def _outcome(self, call: Call[T], first: Reply | GemmwireError | None, transport: Transport) -> T:
        """`first` is what came of an attempt that was made already."""
        while True:
            try:
                if isinstance(first, GemmwireError):
                    raise first
                reply = first or transport.send(call.request, call.timeout)
                return call.read(reply)
            except RETRIED as error:
                seconds = call.failed(error)
            first = None
            time.sleep(seconds)
