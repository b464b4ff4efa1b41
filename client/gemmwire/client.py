"""The synchronous client."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar, overload

from .base import BaseClient, Exchange
from .errors import GemmwireError, InvalidArgument, RefitIncomplete
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .transport import HTTPTransport, Transport
from .weights import Weights

T = TypeVar("T")


class Client(BaseClient):
    """A client of one server, safe to share between threads.

    `url` is http or https, with a path where the server stands behind one. `timeout` (seconds, None: none) is
    for all that a call waits for. `headers` go with every request. At most `max_connections` are open at a
    time; a call beyond them waits for one. `transport` replaces the network, for tests.

    Every method raises a `GemmwireError` and nothing else: `InputError` and `InvalidArgument` before anything
    is sent, `TransportError` where no answer came, `ServerError` for an answer that is an error, `WireError`
    for one that cannot be read.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        timeout: float | None = 60.0,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 64,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(url, timeout, headers)
        if type(max_connections) is not int or max_connections < 1:
            raise InvalidArgument(
                f"max_connections is {max_connections!r}; it must be a whole number above 0"
            )
        self._transport = transport or HTTPTransport(self._url, max_connections)

    def infer(
        self,
        layer: str,
        x: Any,
        *,
        output_dtype: object = None,
        version: str | int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Any:
        """y `[..., N]` = x `[..., K]` @ W.T + b of `layer`, as an array like x.

        x is a NumPy array, a torch tensor or a buffer, of float32, float16 or bfloat16 (the server computes
        from bfloat16); y has x's dtype, or `output_dtype`: "FP32", "FP16", "BF16", or a NumPy or torch dtype.
        `version` asks for these weights and no others. `timeout` (seconds) replaces the client's; the server
        is told, and drops a request whose time has passed. `request_id` comes back in the answer.
        """
        answer = self.call(
            layer, x, output_dtype=output_dtype, version=version, timeout=timeout, request_id=request_id
        )
        return answer.y

    def call(
        self,
        layer: str,
        x: Any,
        *,
        output_dtype: object = None,
        version: str | int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """As `infer`, with what made y: the weights' version, backend, bucket and times."""
        return self._run(self._infer(layer, x, output_dtype, version, timeout, request_id))

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

        Nothing is sent twice. After a `TransportError` the layer's version tells whether it was replaced.
        """
        if isinstance(layer, str):
            return self._run(self._refit(layer, Weights.of(weight, scale, bias), if_version, timeout))
        if not (weight is None and scale is None and bias is None and if_version is None):
            raise InvalidArgument(
                "With a mapping of layers, weight, scale, bias and if_version belong to no layer; refit one "
                "at a time, or give each layer a mapping of its own"
            )
        return self._refit_all({name: Weights.read(name, entry) for name, entry in layer.items()}, timeout)

    def _refit_all(self, layers: Mapping[str, Weights], timeout: float | None) -> dict[str, Refitted]:
        done: dict[str, Refitted] = {}
        for name, weights in layers.items():
            try:
                done[name] = self._run(self._refit(name, weights, None, timeout))
            except GemmwireError as error:
                raise RefitIncomplete(
                    f"{len(done)} of {len(layers)} layers have their new weights; {name!r} failed: {error}",
                    layer=name,
                    done=done,
                ) from error
        return done

    def layers(self) -> list[LayerInfo]:
        """The layers that the server has."""
        return self._run(self._layers())

    def layer(self, name: str) -> LayerInfo:
        """One layer, with all that the server says of it in `config`. Errors: `NotFound`."""
        return self._run(self._layer(name))

    def stats(self, layer: str) -> dict[str, Any]:
        """The layer's counters and times, as in the protocol's statistics extension. Errors: `NotFound`."""
        return self._run(self._stats(layer))

    def server(self) -> ServerInfo:
        return self._run(self._server())

    def live(self) -> bool:
        """Whether the server works, be it still loading. Errors: `TransportError` where none answers."""
        return self._run(self._health("live"))

    def ready(self) -> bool:
        """Whether every layer has been loaded. Errors: `TransportError` where no server answers."""
        return self._run(self._health("ready"))

    def close(self) -> None:
        """Close the connections; a call after this is refused."""
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, exchange: Exchange[T]) -> T:
        return exchange.read(self._transport.send(exchange.request, exchange.timeout))
