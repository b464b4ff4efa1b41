"""Replies of a server -> facts, arrays and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from . import errors, wire
from .arrays import Framework
from .errors import GatewayFailed, ServerError, WireError
from .facts import Answer, LayerInfo, Refitted, ServerInfo
from .http1 import Reply

T = TypeVar("T")

OUTPUT = "y"
_LONGEST_WAIT_S = 1e6  # what a system can sleep for
_LOST = (500, 502)  # as proxies answer for a server that went while it had the request: Ray Serve's, nginx


@dataclass(frozen=True)
class Sent:
    """What an answer must fit: x, its framework and shape, the datatype asked for, the request's id, the
    outputs' names. `taken` takes an output from the shared memory that it was asked for in."""

    framework: Framework
    x: Any
    shape: tuple[int, ...]
    datatype: str
    id: str
    outputs: tuple[str, ...] = (OUTPUT,)
    taken: Callable[[wire.Shared], wire.Buffer] | None = None


def read_answer(reply: Reply, sent: Sent) -> Answer:
    """Errors: `ServerError`; `WireError` for an answer that does not fit what was sent."""
    _refuse_error(reply)
    length = wire.header_length(reply.headers.get(wire.HEADER_LENGTH), len(reply.body))
    response = wire.decode_response(reply.body, length)
    if sent.id and response.id != sent.id:
        raise _misfit(f"the answer to request {sent.id!r} is marked {response.id[:128]!r}")
    parameters = response.parameters
    outputs = {name: sent.framework.from_wire(_output(response, name, sent), sent.x) for name in sent.outputs}
    return Answer(
        y=outputs.get(OUTPUT),
        version=response.model_version,
        backend=_optional(parameters, "backend", str, "the answer") or "",
        bucket=_optional(parameters, "bucket", int, "the answer"),
        queue_us=_optional(parameters, "queue_us", int, "the answer"),
        device_us=_optional(parameters, "device_us", int, "the answer"),
        request_id=response.id,
        outputs=outputs,
    )


def read_nothing(reply: Reply) -> None:
    """Of a reply that says nothing but that it was done. Errors: `ServerError`."""
    _refuse_error(reply)


def read_layers(reply: Reply) -> list[LayerInfo]:
    entries = _document(reply, list)
    return [_layer(entry, {}) for entry in entries if not _is_model(entry)]


def read_layer(reply: Reply) -> LayerInfo:
    config = _document(reply, dict)
    known = set(LayerInfo.__dataclass_fields__)
    return _layer(config, {key: value for key, value in config.items() if key not in known})


def columns_of(layer: LayerInfo) -> dict[str, tuple[int, int]]:
    """The columns of y, start and stop, of each part of a fused layer. Errors: `WireError`."""
    parts: Any = layer.config.get("parts") or ()
    try:
        return {str(part["name"]): (int(part["start"]), int(part["stop"])) for part in parts}
    except (TypeError, KeyError, ValueError):
        raise _misfit(f"the parts of layer {layer.name!r:.80} are {parts!r:.200}") from None


def read_refitted(reply: Reply) -> Refitted:
    document = _document(reply, dict)
    where = "the answer"
    return Refitted(
        name=_required(document, "name", str, where),
        version=_required(document, "version", str, where),
        previous_version=_required(document, "previous_version", str, where),
        quantization_error=_optional(document, "quantization_error", float, where),
        arithmetic_error=_optional(document, "arithmetic_error", float, where),
        seconds=_optional(document, "seconds", dict, where) or {},
    )


def read_server(reply: Reply) -> ServerInfo:
    document = _document(reply, dict)
    extensions = _optional(document, "extensions", list, "the server's metadata") or []
    return ServerInfo(
        name=_required(document, "name", str, "the server's metadata"),
        version=_required(document, "version", str, "the server's metadata"),
        extensions=tuple(map(str, extensions)),
    )


def read_stats(reply: Reply) -> dict[str, Any]:
    entries = _required(_document(reply, dict), "model_stats", list, "the statistics")
    if len(entries) != 1 or not isinstance(entries[0], dict):
        raise _misfit(f"the statistics of one layer have {len(entries)} entries")
    statistics: dict[str, Any] = entries[0]
    return statistics


def read_health(reply: Reply) -> bool:
    """True for 2xx. Errors: `ServerError` for a status that says nothing about the server's health."""
    if reply.status in (401, 403, 404) or 300 <= reply.status < 400:
        raise read_error(reply)
    return 200 <= reply.status < 300


def read_error(reply: Reply) -> ServerError:
    """The error that a reply is, also one that is not gemmwire's: a proxy's page, another server's JSON."""
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError):
        document = None
    fields: Mapping[str, Any] = document if isinstance(document, dict) else {}
    of_a_proxy = reply.status in _LOST and "error" not in fields
    return (GatewayFailed if of_a_proxy else errors.for_status(reply.status))(
        str(fields.get("error") or _unexplained(reply)),
        status=reply.status,
        code=str(fields.get("code") or ""),
        expected=fields.get("expected"),
        got=fields.get("got"),
        request_id=str(fields.get("request_id") or ""),
        retry_after=retry_after(reply),
    )


def _unexplained(reply: Reply) -> str:
    if "location" in reply.headers:
        target = reply.headers["location"][:200]
        return f"HTTP {reply.status}: the server points to {target!r}; make the client with that address"
    text = " ".join(bytes(reply.body[:200]).decode("utf-8", "replace").split())
    return f"HTTP {reply.status}" + (f": {text}" if text else ", without a word of explanation")


def retry_after(reply: Reply) -> float | None:
    """Retry-After in seconds; its other form, a date, is left out."""
    text = reply.headers.get("retry-after")
    if text is None or not (text.isascii() and text.isdigit()):
        return None
    return min(float(text), _LONGEST_WAIT_S)


def _refuse_error(reply: Reply) -> None:
    if not 200 <= reply.status < 300:
        raise read_error(reply)


def _output(response: wire.InferResponse, name: str, sent: Sent) -> wire.Tensor:
    found = [tensor for tensor in response.outputs if tensor.name == name]
    if not found:
        raise _misfit(f"it has no output {name!r}")
    y = found[0]
    if y.datatype != sent.datatype:
        raise _misfit(f"{name} is {y.datatype}, but {sent.datatype} was asked for")
    if len(y.shape) != len(sent.shape) or y.shape[:-1] != sent.shape[:-1]:
        raise _misfit(f"{name} has shape {list(y.shape)}, but x had shape {list(sent.shape)}")
    if (y.shared is not None) != (sent.taken is not None):
        raise _misfit(f"{name} is not where it was asked for, in the body or in shared memory")
    return y if y.shared is None or sent.taken is None else y._replace(data=sent.taken(y.shared))


def _is_model(entry: object) -> bool:
    """Whether an entry of the index is a model as a whole, whose layers have entries of their own."""
    return isinstance(entry, dict) and "layers" in entry


def _layer(entry: object, config: Mapping[str, Any]) -> LayerInfo:
    if not isinstance(entry, dict):
        raise _misfit(f"an entry of the layers is {entry!r:.80}, not an object")
    where = f"layer {entry.get('name')!r:.80}"
    return LayerInfo(
        name=_required(entry, "name", str, where),
        n=_required(entry, "n", int, where),
        k=_required(entry, "k", int, where),
        version=_required(entry, "version", str, where),
        # A server answers with a config for a layer that it serves only.
        state=_optional(entry, "state", str, where) or "READY",
        backend=_optional(entry, "backend", str, where) or "",
        reason=_optional(entry, "reason", str, where) or "",
        bias=_optional(entry, "bias", bool, where),
        config=config,
    )


def _document(reply: Reply, kind: type[T]) -> T:
    _refuse_error(reply)
    try:
        document = json.loads(reply.body)
    except (ValueError, RecursionError):
        raise _misfit(f"it is not JSON: {bytes(reply.body[:80])!r}") from None
    if not isinstance(document, kind):
        raise _misfit(f"it is {document!r:.80}, not a JSON {'array' if kind is list else 'object'}")
    return document


def _required(fields: Mapping[str, Any], key: str, kind: type[T], where: str) -> T:
    value = _optional(fields, key, kind, where)
    if value is None:
        raise _misfit(f"{where} has no {key!r}; is this a gemmwire server?")
    return value


def _optional(fields: Mapping[str, Any], key: str, kind: type[T], where: str) -> T | None:
    value = fields.get(key)
    if value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool))):
        return value
    raise _misfit(f"{key!r} of {where} is {value!r:.80}, which is no {kind.__name__}")


def _misfit(reason: str) -> WireError:
    return WireError("answer_invalid", f"The server's answer cannot be used: {reason}")
