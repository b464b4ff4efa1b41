"""How an https server is checked, and how the client shows who it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import InvalidArgument
from .url import Url

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class TLS:
    """Files in PEM. `ca`: who vouches for the server, instead of the system's authorities. `certificate` and
    `key` (where that is a file of its own): the client's. `verify=False` encrypts towards whoever answers.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    verify: bool = True


def context_for(url: Url, tls: TLS | ssl.SSLContext | None) -> ssl.SSLContext | None:
    """None for http. Errors: `InvalidArgument`, for files that are not there or hold something else too."""
    if url.scheme != "https":
        if tls is not None:
            raise InvalidArgument(f"tls is given, but {url} is not https")
        return None
    import ssl

    if isinstance(tls, ssl.SSLContext):
        return tls
    if tls is not None and not isinstance(tls, TLS):
        raise InvalidArgument(
            f"tls is of type {type(tls).__name__}; a gemmwire.TLS or an ssl.SSLContext is needed"
        )
    return _context(tls or TLS())


def contexts_for(urls: Sequence[Url], tls: TLS | ssl.SSLContext | None) -> list[ssl.SSLContext | None]:
    """One for all that are https. Errors: as of `context_for`, and where `tls` is given and none is."""
    secure = [url for url in urls if url.scheme == "https"]
    context = context_for((secure or urls)[0], tls)
    return [context if url in secure else None for url in urls]


def _context(tls: TLS) -> ssl.SSLContext:
    import ssl

    if tls.key is not None and tls.certificate is None:
        raise InvalidArgument("TLS has a key, but no certificate that it belongs to")
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # ssl's own is one
        raise InvalidArgument(
            f"{tls} cannot be used: {error}; each must be a readable file in PEM"
        ) from error
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
