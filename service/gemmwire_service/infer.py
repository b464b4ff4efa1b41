"""What an infer request goes through, whichever transport carries it; nothing here does I/O.

known layer -> body limit -> (the body comes) -> wire.decode -> checked against the layer -> engine.submit ->
(the answer comes) -> wire.encode. `connection` calls this from the socket, `endpoint` from ASGI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gemmwire import wire
from gemmwire.wire import WireError

from .backends.base import LayerSpec
from .backlog import Answer, Item
from .call import Call, read_call, refuse_large_answer, refuse_many_rows
from .engine import Engine
from .errors import EngineError, KeyRefused, VersionBehind
from .inputs import INPUT
from .layer import Layer
from .outputs import DATATYPES
from .response import encode
from .shared_tensors import Source, any_shared, deliver, fetch, hold, source_of
from .shm import Regions

Headers = dict[bytes, bytes]
T = TypeVar("T")
# JSON part, length of the rest, timeout, id of the spec, generation of the regions.
Known = tuple[bytes, int, bytes | None, int, int]

TIMEOUT = b"gemmwire-timeout-us"
HEADER_LENGTH = wire.HEADER_LENGTH.encode()
# JSON of this size takes so long that it is read, or written, on another thread than the event loop.
PARSE_ELSEWHERE_FROM = 256 << 10  # bytes
_ENCODE_ELSEWHERE_FROM = 4096  # numbers
_CUT_ELSEWHERE_FROM = 1 << 20
_REMEMBERED = 1024  # bytes of a JSON part, as binary requests have it
_CALLS = 2048  # the layers of a large model, and of each some numbers of rows
_JOIN_BELOW = 64 << 10  # bytes

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(frozen=True)
class Limits:
    body_bytes: int
    json_bytes: int
    rows: int


class Reply(NamedTuple):
    """An answer before it is HTTP: `buffers` are its body, in order, not joined."""

    status: int
    headers: dict[str, str]
    buffers: list[wire.Buffer]
    reason: str = ""  # the code of an error

    def fields(self, headers: Headers) -> dict[str, str]:
        """Those of its head, in answer to a request that had these `headers`."""
        return reply_fields(self.headers, wire.buffers_size(self.buffers), request_id(headers))


def reply_fields(headers: dict[str, str], size: int, identity: str) -> dict[str, str]:
    """A reply's own headers, the length of its body, and the id of the request where it had one."""
    fields = {**headers, "content-length": str(size)}
    if identity:
        fields["x-request-id"] = identity
    return fields


class Infer:
    """The steps between which a transport waits: for the body, and for the device."""

    def __init__(self, engine: Engine, limits: Limits, regions: Regions) -> None:
        self.limits = limits
        self.regions = regions
        self.traffic = engine.traffic
        self.held = engine.held
        self._engine = engine
        self._wire_limits = wire.Limits(json_bytes=limits.json_bytes)
        # Beside what is remembered its spec, which must outlive its id.
        self._calls: dict[Known, tuple[LayerSpec, Call]] = {}
        self._shared_calls: dict[Known, tuple[LayerSpec, Call, Source]] = {}

    def layer(self, name: str, version: str | None) -> Layer:
        """Errors, before the body is read: NotReady, Draining, `layer_unknown`, `version_unknown`."""
        self._engine.refuse_unless_ready()
        return find_layer(self._engine, name, version)

    def call(self, body: memoryview, headers: Headers, layer: Layer) -> Call:
        """Errors: WireError, for whatever the body is that the layer does not take; VersionBehind."""
        call = self._call(body, headers, layer)
        if call.minimum > layer.version:  # which only grows
            raise _behind(layer, call.minimum)
        return call

    def _call(self, body: memoryview, headers: Headers, layer: Layer) -> Call:
        length = wire.header_length(headers.get(HEADER_LENGTH), len(body))
        if length and length <= _REMEMBERED:
            return self._known_call(body, length, headers.get(TIMEOUT), layer)
        if length is None and self.regions and len(body) <= _REMEMBERED:
            return self._shared_call(body, headers.get(TIMEOUT), layer)
        return self._read_call(body, length, headers.get(TIMEOUT), layer)

    def _known_call(self, body: memoryview, length: int, timeout: bytes | None, layer: Layer) -> Call:
        """A client sends the same JSON part again and again, before other numbers."""
        data = body[length:]
        key = (bytes(body[:length]), len(data), timeout, id(layer.spec), self.regions.generation)
        known = self._calls.get(key)
        if known is not None:
            return known[1].over(data)
        call = self._read_call(body, length, timeout, layer)
        if call.in_place and len(call.x.data) == len(data) > 0:  # all that is behind the JSON part is x
            _remember(self._calls, key, (layer.spec, call.over(b"")))
        return call

    def _shared_call(self, body: memoryview, timeout: bytes | None, layer: Layer) -> Call:
        """As `_known_call`, where x is behind no JSON part, but in shared memory."""
        key = (bytes(body), 0, timeout, id(layer.spec), self.regions.generation)
        known = self._shared_calls.get(key)
        if known is not None:
            _, call, source = known
            data, take_back = source.region.lend(source.place)
            return call.over(data)._replace(take_back=take_back)
        request = wire.decode_request(body, None, self._wire_limits)
        call = self._checked(request, timeout, layer)
        only = source_of(request, self.regions)
        if only is not None:
            _remember(self._shared_calls, key, (layer.spec, call.over(b""), only))
        return call

    def _read_call(self, body: memoryview, length: int | None, timeout: bytes | None, layer: Layer) -> Call:
        if length == 0:
            request = wire.decode_raw_request(body, INPUT, DATATYPES[0], layer.spec.k)
        else:
            request = wire.decode_request(body, length, self._wire_limits)
        return self._checked(request, timeout, layer)

    def _checked(self, request: wire.InferRequest, timeout: bytes | None, layer: Layer) -> Call:
        shared = any_shared(request)
        if shared:
            request = fetch(request, self.regions, self.limits.body_bytes)
        call = read_call(request, layer.spec, _timeout(timeout))
        refuse_many_rows(call.rows, self.limits.rows)
        refuse_large_answer(call, layer.spec, self.limits.body_bytes, self.limits.json_bytes)
        return hold(call, self.regions) if shared else call

    def submit(
        self,
        call: Call,
        layer: Layer,
        on_done: Callable[[Item], None],
        on_wait: Callable[[Item], None] | None = None,
    ) -> Item:
        """For a call of at least one row. Errors: QueueFull, NotReady, Draining, DeadlineExceeded."""
        return self._engine.submit(layer, call.x, call.rows, call.datatype, on_done, call.deadline(), on_wait)

    def reply(self, call: Call, layer: Layer, answer: Answer | None, version: str | None) -> Reply:
        """`answer` None is the answer of a call without rows; `version` is what the caller asked for.

        Errors: `version_unknown` where the weight was replaced while the call waited, `region_gone` where the
        shared memory of x or for y was taken away.
        """
        if call.take_back is not None:
            call.take_back()
        if answer is not None:
            refuse_other_version(layer.name, version, answer.version)
            if call.targets:
                deliver(call, layer.spec.n, answer)
        return Reply(200, *encode(call, layer.spec, layer.version, layer.backend.name, answer))


def _remember(known: dict[Known, T], key: Known, value: T) -> None:
    if len(known) >= _CALLS:
        known.clear()
    known[key] = value


def joined(buffers: list[wire.Buffer], size: int) -> list[wire.Buffer]:
    """Buffers of `size` bytes in all, as they are to be written: one small copy is cheaper than one more
    system call."""
    return [b"".join(buffers)] if size < _JOIN_BELOW else buffers


def encodes_elsewhere(call: Call, layer: Layer) -> bool:
    """Whether the reply takes so long to write that the event loop must not be the one that does: much JSON,
    or parts to be cut from many rows."""
    numbers = call.rows * call.width(layer.spec.n)
    return numbers >= (_CUT_ELSEWHERE_FROM if call.binary else _ENCODE_ELSEWHERE_FROM) and (
        not call.binary or bool(call.columns)
    )


def find_layer(engine: Engine, name: str, version: str | None = None) -> Layer:
    """Errors: `layer_unknown`, `version_unknown`, both 404; NotReady while there are no layers at all."""
    layer = engine.layers.get(name)
    if layer is None:
        if not engine.layers:
            engine.refuse_unless_ready()
        _refuse_part(engine, name)
        raise unknown_layer(name, engine.layers)
    refuse_other_version(name, version, layer.version)
    return layer


def unknown_layer(name: str, layers: Iterable[str]) -> WireError:
    known = sorted(layers)
    shown = (", ".join(known[:5]) or "none") + (f", ... ({len(known)} in all)" if len(known) > 5 else "")
    return WireError(
        "layer_unknown",
        f"There is no layer {name[:120]!r}; the layers are {shown}. POST /v2/repository/index lists them",
        status=404,
        expected=known[:5],
        got=name[:120],
    )


def _refuse_part(engine: Engine, name: str) -> None:
    """Errors: `layer_unknown`, naming the fused layer of which `name` is a part."""
    module, _, last = name.rpartition(".")
    for layer in engine.layers.values():
        of_module = layer.name.rpartition(".")[0] == module
        if of_module and any(part.name == last for part in layer.spec.parts):
            raise WireError(
                "layer_unknown",
                f"{name[:120]!r} is fused into layer {layer.name!r}; ask that for its output {last!r}, and "
                "refit it as a whole",
                status=404,
                expected=layer.name,
                got=name[:120],
            )


def _behind(layer: Layer, minimum: int) -> VersionBehind:
    return VersionBehind(
        f"Layer {layer.name!r} is in version {layer.version} here, and the request asks for {minimum} or "
        "newer; try again: another server may have it, and this one may get it",
        expected=f">= {minimum}",
        got=layer.version,
    )


def refuse_other_version(name: str, version: str | None, served: int) -> None:
    if version is not None and version != str(served):
        raise WireError(
            "version_unknown",
            f"Layer {name!r} is served in version {served}, not {version[:40]!r}; leave the version "
            "out for the current one",
            status=404,
            expected=str(served),
            got=version[:40],
        )


def error_reply(error: Exception, headers: Headers) -> Reply:
    """The reply of an error: the sentence, the code and the two sides."""
    known = isinstance(error, (WireError, EngineError))
    status = error.status if isinstance(error, (WireError, EngineError)) else 500
    code = getattr(error, "code", "internal") if known else "internal"
    document = {
        "error": str(error) if known else "The server failed on this request; its log has the details",
        "code": code,
        "expected": getattr(error, "expected", None),
        "got": getattr(error, "got", None),
        "request_id": request_id(headers),
    }
    reply = {"content-type": "application/json"}
    if status == 503:
        reply["retry-after"] = "1"
    if isinstance(error, KeyRefused):
        reply["www-authenticate"] = error.challenge
    return Reply(status, reply, [json.dumps(document, default=str).encode()], code)


def request_id(headers: Headers) -> str:
    """The caller's x-request-id (or triton-request-id), where it is one that may be echoed."""
    value = headers.get(b"x-request-id") or headers.get(b"triton-request-id")
    if value is None:
        return ""
    return value.decode() if _REQUEST_ID.fullmatch(value) else ""


def refuse_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    """Errors: `frame_invalid` where a header that says how to read the body comes twice."""
    names = [name for name, _ in headers]
    for name in (HEADER_LENGTH, b"content-encoding", TIMEOUT):
        if names.count(name) > 1:
            raise WireError(
                "frame_invalid",
                f"Header {name.decode()} came {names.count(name)} times; send it once",
                expected=1,
                got=names.count(name),
            )


def tensor_offset(headers: Headers) -> int:
    """Where in the body the first tensor will lie, if the header that says so is one; else 0."""
    value = headers.get(HEADER_LENGTH)
    return int(value) if value is not None and value.isdigit() and len(value) < 10 else 0


def _timeout(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise WireError(
            "request_invalid",
            f"Header {TIMEOUT.decode()} is {value[:40].decode('latin-1')!r}; it must be a whole number of "
            "microseconds",
            expected="microseconds",
        )
    return int(value)
