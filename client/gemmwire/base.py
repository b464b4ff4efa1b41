"""Everything of a client that waits for nothing: requests are made here and replies are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from . import __version__, arguments, replies, wire
from .arrays import Framework, datatype_of, framework_of
from .errors import InputError, InvalidArgument
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .http1 import Reply, Request
from .retries import Retries, retries_of
from .url import parse_urls, segment
from .weights import Weights

T = TypeVar("T")

INPUT = "x"
CODES, SCALES = "x_e4m3", "x_scale_e8m0"


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """What one call sends and what it makes of the reply.

    `request` makes the request of a reply that may take so many seconds from now, `timeout` the first time.
    `retried`: it may be made again after a failure, whatever became of it.
    """

    request: Callable[[float | None], Request]
    timeout: float | None
    read: Callable[[Reply], T]
    retried: bool = True


class BaseClient:
    def __init__(
        self,
        url: str | Sequence[str],
        timeout: float | None,
        headers: Mapping[str, str] | None,
        api_key: str | None,
        retries: Retries | int,
        quantize: str,
    ) -> None:
        self._urls = parse_urls(url)
        self._several = len(self._urls) > 1
        self._base_path = "" if self._several else self._urls[0].prefix
        self._timeout = arguments.seconds(timeout)
        self._retries = retries_of(retries)
        arguments.by_client(quantize)
        self._quantize = quantize
        given = arguments.headers_of(headers or {})
        self._headers = {
            **({} if self._several else {"host": self._urls[0].authority}),  # of several each has its own
            "user-agent": f"gemmwire/{__version__}",
            "accept-encoding": "identity",
            **given,
            **arguments.authorization(api_key, given),
        }

    @property
    def url(self) -> str:
        """The server's address, in one spelling: without a slash at its end or its scheme's own port. Of
        several servers those of all, with a space between them."""
        return " ".join(self.urls)

    @property
    def urls(self) -> tuple[str, ...]:
        """The address of each server."""
        return tuple(map(str, self._urls))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.urls) if self._several else self.url!r})"

    def __reduce__(self) -> NoReturn:
        """For `copy` and `pickle`. Errors: `InputError`; connections belong to a process, keys to no file."""
        raise InputError(
            "type_unsupported",
            f"{self!r} holds connections and keys, and is not copied or pickled: make one in each process "
            "(after a fork this one goes on)",
        )

    def _infer(
        self,
        layer: str,
        x: Any,
        output_dtype: object = None,
        version: str | int | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        quantize: str | None = None,
        outputs: Sequence[str] | None = None,
        min_version: str | int | None = None,
    ) -> Exchange[Answer]:
        framework = framework_of(x)
        if arguments.by_client(self._quantize if quantize is None else quantize):
            inputs, datatype = quantized_inputs(framework, x)
        else:
            inputs = (framework.to_wire(x, INPUT),)
            datatype = inputs[0].datatype
        if output_dtype is not None:
            datatype = datatype_of(output_dtype)
            reason = framework.refuse(datatype)
            if reason is not None:
                raise InputError("dtype_unsupported", f"y cannot come back as {datatype}: {reason}")
        names = arguments.outputs_of(outputs)
        identity = arguments.request_id_of(request_id)
        path = _layer_path(layer) + (
            "" if version is None else f"/versions/{segment(str(version), 'version')}"
        )
        message = wire.InferRequest(
            inputs=inputs,
            outputs=tuple(wire.RequestedOutput(name, binary=True, datatype=datatype) for name in names),
            id=identity,
            parameters=arguments.minimum(min_version),
        )
        sent = replies.Sent(framework, x, inputs[0].shape, datatype, identity, names)
        return self._exchange(layer, path + "/infer", message, sent, self._seconds(timeout))

    def _exchange(
        self, layer: str, path: str, message: wire.InferRequest, sent: replies.Sent, timeout: float | None
    ) -> Exchange[Answer]:
        return Exchange(
            partial(self._infer_request, path, message), timeout, partial(replies.read_answer, sent=sent)
        )

    def _infer_request(self, path: str, message: wire.InferRequest, timeout: float | None) -> Request:
        """The server is told how long its answer may take."""
        if timeout is not None:
            parameters = {**message.parameters, "timeout": max(1, round(timeout * 1e6))}
            message = replace(message, parameters=parameters)
        headers, buffers = wire.encode_request(message)
        if message.id:
            headers["x-request-id"] = message.id
        again = partial(self._infer_request, path, message) if self._several else None
        return self._request("POST", path, headers, buffers, again)

    def _refit(
        self, layer: str, weights: Weights, if_version: str | int | None, timeout: float | None
    ) -> Exchange[Refitted]:
        headers = {"content-type": "application/octet-stream"}
        if if_version is not None:
            headers["if-match"] = arguments.version_of(if_version)
        path = f"/v2/repository/models/{segment(layer, 'layer')}/weights"
        request = replace(self._request("PUT", path, headers, weights.encode()), repeatable=False)
        return Exchange(
            lambda _: request, self._seconds(timeout), replies.read_refitted, retried=if_version is not None
        )

    def _layers(self) -> Exchange[list[LayerInfo]]:
        json = {"content-type": "application/json"}
        request = self._request("POST", "/v2/repository/index", json, [b"{}"])
        return Exchange(lambda _: request, self._timeout, replies.read_layers)

    def _layer(self, name: str) -> Exchange[LayerInfo]:
        return self._get(_layer_path(name) + "/config", replies.read_layer)

    def _stats(self, name: str) -> Exchange[dict[str, Any]]:
        self._refuse_several("statistics are")
        return self._get(_layer_path(name) + "/stats", replies.read_stats)

    def _server(self) -> Exchange[ServerInfo]:
        return self._get("/v2", replies.read_server)

    def _health(self, kind: str) -> Exchange[bool]:
        return self._get(f"/v2/health/{kind}", replies.read_health)

    def _get(self, path: str, read: Callable[[Reply], T]) -> Exchange[T]:
        request = self._request("GET", path, {}, [])
        return Exchange(lambda _: request, self._timeout, read)

    def _refuse_several(self, what: str) -> None:
        if self._several:
            raise InvalidArgument(
                f"{what} of one server, and this client has {len(self._urls)}: make a client of each, as "
                f"{type(self).__name__}({self.urls[0]!r})"
            )

    def _refuse_one_transport(self, given: object) -> None:
        if self._several and given is not None:
            raise InvalidArgument(
                f"transport replaces the network of one server; {len(self._urls)} URLs are given: give one"
            )

    def _seconds(self, timeout: float | None) -> float | None:
        """Of one call: the client's own unless it is given."""
        return self._timeout if timeout is None else arguments.seconds(timeout)

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: list[wire.Buffer],
        again: Callable[[float | None], Request] | None = None,
    ) -> Request:
        fields = {**self._headers, **headers}
        return Request(method, self._base_path + path, fields, body, again=again)


def quantized_inputs(framework: Framework, x: Any) -> tuple[tuple[wire.Tensor, ...], str]:
    """x as codes and scales, and the datatype that its own elements have."""
    datatype = framework.checked(x)
    codes, scales = framework.quantize(x, marked=True)
    inputs = tuple(
        wire.Tensor(name, "UINT8", tuple(part.shape), framework.memory(part, name))
        for name, part in ((CODES, codes), (SCALES, scales))
    )
    return inputs, datatype


def _layer_path(name: str) -> str:
    return f"/v2/models/{segment(name, 'layer')}"
