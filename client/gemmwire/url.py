"""The server's address, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from .errors import InvalidArgument

_PORTS = {"http": 80, "https": 443}
_UNIX = "unix"


@dataclass(frozen=True)
class Url:
    """`prefix` is the path that every request's path is put behind, "" or "/a/b".

    `socket` is the path of a Unix socket, else "".
    """

    scheme: str
    host: str
    port: int
    prefix: str
    socket: str = ""

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        if self.socket:
            return self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """The address without the prefix."""
        return f"{self.scheme}://{quote(self.socket) or self.authority}"

    def __str__(self) -> str:
        return self.origin + self.prefix


def parse_url(text: str) -> Url:
    """`http://host[:port][/prefix]`, or https; `unix:///path` of a socket. Errors: `InvalidArgument`."""
    if not isinstance(text, str) or any(character <= " " or character == "\x7f" for character in text):
        raise _invalid(text, "it must be a string without spaces or control characters")
    try:
        parts = urlsplit(text)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError as error:  # UnicodeError, from a host name that cannot be, is one
        raise _invalid(text, f"it cannot be read: {error}") from None
    if parts.scheme == _UNIX:
        return _unix(text, parts.netloc, parts.path, parts.query or parts.fragment)
    if parts.scheme not in _PORTS:
        raise _invalid(text, "it must start with http://, https:// or unix:///")
    if parts.username is not None or parts.password is not None:
        raise _invalid(text, "send credentials in a header: headers={...}")
    if not host:
        raise _invalid(text, "it has no host name")
    if parts.query or parts.fragment:
        raise _invalid(text, "it must end with its path; a query or fragment has no meaning here")
    prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
    return Url(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, prefix)


def parse_urls(urls: str | Sequence[str]) -> tuple[Url, ...]:
    """One URL, or several of which each is another server. Errors: `InvalidArgument`."""
    if isinstance(urls, str) or not isinstance(urls, Sequence):
        return (parse_url(urls),)
    parsed = tuple(map(parse_url, urls))
    if not parsed:
        raise InvalidArgument("The servers' URLs are an empty list; one is needed, as http://127.0.0.1:8000")
    for index, url in enumerate(parsed):
        if url in parsed[:index]:
            raise InvalidArgument(f"The server's URL {str(url)!r} is given twice; leave one of them out")
    return parsed


def _unix(text: str, host: str, path: str, rest: str) -> Url:
    socket = unquote(path)
    if host or rest or len(socket) < 2 or "\0" in socket:
        raise _invalid(text, "behind unix:// comes the absolute path of a socket: unix:///run/gemmwire.sock")
    return Url(_UNIX, "localhost", 0, "", socket)


def segment(name: str, what: str) -> str:
    """A name as one segment of a path. Errors: `InvalidArgument`."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        raise InvalidArgument(f"{what} is {name!r}; it must be a string that can be part of a URL")
    try:
        return quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is {name!r}; it holds half of a surrogate pair") from None


def _invalid(text: object, rule: str) -> InvalidArgument:
    if isinstance(text, str) and "@" in text:
        text = "...@" + text.rpartition("@")[2]  # in front of it may stand a password
    return InvalidArgument(f"The server's URL is {text!r}; {rule}, as in http://127.0.0.1:8000")
