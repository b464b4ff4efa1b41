"""Everything of a client that waits for nothing: requests are made here and replies are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from . import __version__, http1, replies, wire
from .arrays import datatype_of, framework_of
from .errors import InputError, InvalidArgument
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .http1 import Reply, Request
from .url import parse_url, segment
from .weights import Weights

T = TypeVar("T")

INPUT = "x"
_OF_THE_FRAME = {
    "connection",
    "content-length",
    "content-type",
    "expect",
    "transfer-encoding",
    wire.HEADER_LENGTH,
}


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """A request, how long its reply may take (seconds), and what the reply is turned into."""

    request: Request
    timeout: float | None
    read: Callable[[Reply], T]


class BaseClient:
    def __init__(self, url: str, timeout: float | None, headers: Mapping[str, str] | None) -> None:
        self._url = parse_url(url)
        self._timeout = _seconds(timeout)
        self._headers = {
            "host": self._url.authority,
            "user-agent": f"gemmwire/{__version__}",
            "accept-encoding": "identity",
            **_checked_headers(headers or {}),
        }

    @property
    def url(self) -> str:
        """The server's address, as it was given."""
        return str(self._url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._url)!r})"

    def _infer(
        self,
        layer: str,
        x: Any,
        output_dtype: object,
        version: str | int | None,
        timeout: float | None,
        request_id: str | None,
    ) -> Exchange[Answer]:
        framework = framework_of(x)
        tensor = framework.to_wire(x, INPUT)
        datatype = tensor.datatype
        if output_dtype is not None:
            datatype = datatype_of(output_dtype)
            reason = framework.refuse(datatype)
            if reason is not None:
                raise InputError("dtype_unsupported", f"y cannot come back as {datatype}: {reason}")
        seconds = self._timeout if timeout is None else _seconds(timeout)
        identity = _checked_id(request_id)
        headers, buffers = wire.encode_request(
            wire.InferRequest(
                inputs=(tensor,),
                outputs=(wire.RequestedOutput(replies.OUTPUT, binary=True, datatype=datatype),),
                id=identity,
                parameters={} if seconds is None else {"timeout": max(1, round(seconds * 1e6))},
            )
        )
        if identity:
            headers["x-request-id"] = identity
        path = _layer_path(layer) + (
            "" if version is None else f"/versions/{segment(str(version), 'version')}"
        )
        sent = replies.Sent(framework, x, tensor.shape, datatype, identity)
        request = self._request("POST", path + "/infer", headers, buffers)
        return Exchange(request, seconds, partial(replies.read_answer, sent=sent))

    def _refit(
        self, layer: str, weights: Weights, if_version: str | int | None, timeout: float | None
    ) -> Exchange[Refitted]:
        headers = {"content-type": "application/octet-stream"}
        if if_version is not None:
            headers["if-match"] = _checked_version(if_version)
        path = f"/v2/repository/models/{segment(layer, 'layer')}/weights"
        request = replace(self._request("PUT", path, headers, weights.encode()), repeatable=False)
        seconds = self._timeout if timeout is None else _seconds(timeout)
        return Exchange(request, seconds, replies.read_refitted)

    def _layers(self) -> Exchange[list[LayerInfo]]:
        json = {"content-type": "application/json"}
        request = self._request("POST", "/v2/repository/index", json, [b"{}"])
        return Exchange(request, self._timeout, replies.read_layers)

    def _layer(self, name: str) -> Exchange[LayerInfo]:
        return self._get(_layer_path(name) + "/config", replies.read_layer)

    def _stats(self, name: str) -> Exchange[dict[str, Any]]:
        return self._get(_layer_path(name) + "/stats", replies.read_stats)

    def _server(self) -> Exchange[ServerInfo]:
        return self._get("/v2", replies.read_server)

    def _health(self, kind: str) -> Exchange[bool]:
        return self._get(f"/v2/health/{kind}", replies.read_health)

    def _get(self, path: str, read: Callable[[Reply], T]) -> Exchange[T]:
        return Exchange(self._request("GET", path, {}, []), self._timeout, read)

    def _request(
        self, method: str, path: str, headers: Mapping[str, str], body: list[wire.Buffer]
    ) -> Request:
        return Request(method, self._url.prefix + path, {**self._headers, **headers}, body)


def _layer_path(name: str) -> str:
    return f"/v2/models/{segment(name, 'layer')}"


def _seconds(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9:
        raise InvalidArgument(f"timeout is {timeout!r}; it must be seconds above 0, or None")
    return float(timeout)


def _checked_id(request_id: str | None) -> str:
    if request_id is None:
        return ""
    visible = isinstance(request_id, str) and all("!" <= character <= "~" for character in request_id)
    if not visible or not 0 < len(request_id) <= 128:
        raise InvalidArgument(
            f"request_id is {request_id!r:.150}; it must be 1 to 128 visible ASCII characters without spaces"
        )
    return request_id


def _checked_version(version: str | int) -> str:
    text = str(version)
    if isinstance(version, bool) or not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidArgument(f"if_version is {version!r:.80}; it must be a version that a layer has had")
    return text


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    checked: dict[str, str] = {}
    for name, value in headers.items():
        if not (isinstance(name, str) and http1.is_token(name)):
            raise InvalidArgument(f"Header name {name!r:.80} is not one; it must be ASCII letters and dashes")
        if name.lower() in _OF_THE_FRAME:
            raise InvalidArgument(f"Header {name!r} belongs to the message itself; leave it out")
        if not (isinstance(value, str) and value.isprintable() and all(ord(c) < 256 for c in value)):
            # The value may be a secret, and is not repeated.
            raise InvalidArgument(f"The value of header {name!r} must be printable Latin-1, on one line")
        checked[name.lower()] = value.strip()
    return checked
