"""The server's address, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from .errors import InvalidArgument

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Url:
    """`prefix` is the path that every request's path is put behind, "" or "/a/b"."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_url(text: str) -> Url:
    """`http://host[:port][/prefix]`, or https. Errors: `InvalidArgument`."""
    if not isinstance(text, str) or any(character <= " " or character == "\x7f" for character in text):
        raise _invalid(text, "it must be a string without spaces or control characters")
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError as error:  # UnicodeError, from a host name that cannot be, is one
        raise _invalid(text, f"it cannot be read: {error}") from None
    if parts.scheme not in _PORTS:
        raise _invalid(text, "it must start with http:// or https://")
    if parts.username is not None or parts.password is not None:
        raise _invalid(
            "...@" + parts.netloc.rpartition("@")[2], "send credentials in a header: headers={...}"
        )
    if not host:
        raise _invalid(text, "it has no host name")
    if parts.query or parts.fragment:
        raise _invalid(text, "it must end with its path; a query or fragment has no meaning here")
    prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
    return Url(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, prefix)


def segment(name: str, what: str) -> str:
    """A name as one segment of a path. Errors: `InvalidArgument`."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        raise InvalidArgument(f"{what} is {name!r}; it must be a string that can be part of a URL")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is {name!r}; it holds half of a surrogate pair") from None


def _invalid(text: object, rule: str) -> InvalidArgument:
    return InvalidArgument(f"The server's URL is {text!r}; {rule}, as in http://127.0.0.1:8000")
