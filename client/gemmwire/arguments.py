"""The arguments of a client and its calls, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import http1
from .errors import InvalidArgument
from .messages import HEADER_LENGTH

_OF_THE_FRAME = {
    "connection",
    "content-length",
    "content-type",
    "expect",
    "transfer-encoding",
    HEADER_LENGTH,
}


_LONGEST_S = 2_000_000  # poll counts milliseconds in 31 bits


def seconds(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout <= _LONGEST_S:
        raise InvalidArgument(
            f"timeout is {timeout!r}; it must be seconds above 0, at most {_LONGEST_S} (23 days), or None"
        )
    return float(timeout)


def request_id_of(request_id: str | None) -> str:
    if request_id is None:
        return ""
    visible = isinstance(request_id, str) and all("!" <= character <= "~" for character in request_id)
    if not visible or not 0 < len(request_id) <= 128:
        raise InvalidArgument(
            f"request_id is {request_id!r:.150}; it must be 1 to 128 visible ASCII characters without spaces"
        )
    return request_id


def outputs_of(outputs: Sequence[str] | None) -> tuple[str, ...]:
    if outputs is None:
        return ("y",)
    names = () if isinstance(outputs, str) else tuple(outputs)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"outputs is {outputs!r:.150}; it must be names of outputs, each of them once")
    return names


def calls_of(calls: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each as it comes. Errors: `InvalidArgument`, with its index."""
    if not isinstance(calls, Iterable):
        raise InvalidArgument(f"calls is of type {type(calls).__name__}; pairs are needed: [(layer, x), ...]")
    for index, call in enumerate(calls):
        if not isinstance(call, (tuple, list)) or len(call) != 2:
            what = f"{call!r:.80}" if isinstance(call, str) else f"of type {type(call).__name__}"
            raise InvalidArgument(f"calls[{index}] is {what}; each has to be a pair: [(layer, x), ...]")
        yield call[0], call[1]


def version_of(version: str | int, name: str = "if_version") -> str:
    text = str(version)
    if isinstance(version, bool) or not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise InvalidArgument(f"{name} is {version!r:.80}; it must be a version that a layer has had")
    return text


def minimum(version: str | int | None) -> dict[str, int]:
    """The parameter of a request that no older weights may answer."""
    return {} if version is None else {"minimum_version": int(version_of(version, "min_version"))}


def headers_of(headers: Mapping[str, str]) -> dict[str, str]:
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


def authorization(api_key: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    """The header that carries a key (RFC 6750), if there is one. Errors: `InvalidArgument`."""
    if api_key is None:
        return {}
    if "authorization" in headers:
        raise InvalidArgument("api_key is given, and a header Authorization too; leave one of them out")
    visible = isinstance(api_key, str) and all("!" <= character <= "~" for character in api_key)
    if not visible or not api_key:
        # It may be a secret with a line break behind it, and is not repeated.
        raise InvalidArgument("api_key must be visible ASCII characters without spaces or line breaks")
    return {"authorization": f"Bearer {api_key}"}


def whole(value: int, name: str) -> int:
    """Errors: `InvalidArgument` unless it is a whole number above 0."""
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{name} is {value!r}; it must be a whole number above 0")
    return value


def by_client(quantize: str) -> bool:
    """Whether the client quantizes. Errors: `InvalidArgument`."""
    if quantize not in ("client", "server"):
        raise InvalidArgument(f"quantize is {quantize!r:.80}; it must be 'client' or 'server'")
    return quantize == "client"
