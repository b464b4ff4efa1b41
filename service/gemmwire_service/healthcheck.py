"""Ask the service in this container whether it is ready: `python -m gemmwire_service.healthcheck [--live]`.

The exit status is 0 if it is and 1 if it is not, for a reason that standard error gives; a HEALTHCHECK knows
these two. Where the service listens is taken from GEMMWIRE_UDS, or else from GEMMWIRE_HOST and GEMMWIRE_PORT,
and from GEMMWIRE_TLS_CERT whether it speaks https: in a container these are to be set as variables, since the
flags of another process cannot be seen.
Standard library alone: it is started every few seconds, and torch takes a second to import.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection

READY = "/v2/health/ready"
LIVE = "/v2/health/live"
HOST, PORT = "127.0.0.1", 8000  # the defaults of settings.py, which cannot be imported: it takes pydantic
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # bound to all addresses, it is reached at this
SECONDS = 4.0  # less than the HEALTHCHECK's own limit, so that the reason is told
USAGE = "usage: python -m gemmwire_service.healthcheck [--live]; it takes nothing else"


class Unhealthy(Exception):
    """The service is not as it should be, or cannot be asked; the message says why."""


class _UnixConnection(HTTPConnection):
    """HTTP over the Unix socket at `path`."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def connection(environ: Mapping[str, str], timeout: float = SECONDS) -> HTTPConnection:
    """To where a service with these variables listens. Errors: Unhealthy where they do not say."""
    uds = environ.get("GEMMWIRE_UDS")
    if uds:
        return _UnixConnection(uds, timeout)
    host = environ.get("GEMMWIRE_HOST", HOST)
    text = environ.get("GEMMWIRE_PORT", str(PORT))
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise Unhealthy(f"GEMMWIRE_PORT is {text!r}; a fixed port, 1 to 65535, is needed to ask there")
    if environ.get("GEMMWIRE_TLS_CERT"):
        return HTTPSConnection(ANY.get(host, host), int(text), timeout=timeout, context=_unverified())
    return HTTPConnection(ANY.get(host, host), int(text), timeout=timeout)


def _unverified() -> ssl.SSLContext:
    """Nobody is between a container and itself, and its certificate is for the name that others use."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check(path: str, environ: Mapping[str, str], timeout: float = SECONDS) -> None:
    """Errors: Unhealthy unless a GET of `path` is answered 200 within `timeout` seconds."""
    link = connection(environ, timeout)
    where = getattr(link, "path", None) or f"{link.host}:{link.port}"
    try:
        link.request("GET", path)
        status = link.getresponse().status
    except (OSError, HTTPException) as error:
        raise Unhealthy(f"no answer from {where}: {type(error).__name__}: {error}") from None
    finally:
        link.close()
    if status != 200:
        raise Unhealthy(f"{where}{path} answers {status}: the service is not ready")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given not in ([], ["--live"]):
        print(f"{USAGE}, got {' '.join(given)}", file=sys.stderr)
        return 1
    try:
        check(LIVE if given else READY, os.environ)
    except Unhealthy as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
