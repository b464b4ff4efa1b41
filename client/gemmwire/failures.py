"""What the system raises while a request is under way -> the errors of this package."""

from __future__ import annotations

import errno
import socket

from .errors import ConnectionFailed, TimedOut, TransportError
from .http1 import Request
from .url import Url

_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")  # OpenSSL's words for it


class Busy(TimeoutError):
    """The time passed in the wait for a connection, before anything was sent."""

    def __init__(self, connections: int) -> None:
        super().__init__(f"all of the client's connections ({connections}) were in use")


class ClientClosed(ConnectionError):
    def __init__(self) -> None:
        super().__init__("this client has been closed; make a new one")


def too_slow(seconds: float) -> OSError:
    """A connection that was not made in time, though the call has time left."""
    return OSError(errno.ETIMEDOUT, f"no connection within {seconds:.3g} s")


def transport_error(error: OSError, request: Request, url: Url, timeout: float | None) -> TransportError:
    """TimeoutError is the call's own `timeout`, unless it has the number of a system's error."""
    what = f"{request.method} {url.origin}{request.path}"
    if isinstance(error, TimeoutError) and timeout is not None and error.errno is None:
        busy = f"; {error}" if isinstance(error, Busy) else ""
        return TimedOut(f"{what}: no complete answer within {timeout:g} s{busy}")
    return ConnectionFailed(f"{what}: {_reason(error, url)}", passing=_is_passing(error))


def _is_passing(error: OSError) -> bool:
    # By name, because importing ssl costs more than the rest of this package.
    return not isinstance(error, ClientClosed) and type(error).__name__ != "SSLCertVerificationError"


def _reason(error: OSError, url: Url) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the connection was refused; does a server listen there?"
    if isinstance(error, FileNotFoundError):
        return "there is no such socket; does a server listen there (gemmwire-serve --uds PATH)?"
    if isinstance(error, socket.gaierror):
        return f"the name {url.host!r} is not known here ({error.strerror}); is it spelled right?"
    said = str(error) or type(error).__name__
    if getattr(error, "reason", None) in _NO_TLS:
        return f"what listens there does not speak TLS ({said}); is it http:// and not https://?"
    return said
