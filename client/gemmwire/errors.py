"""Everything that can go wrong, as one tree.

GemmwireError
├── WireError               bytes that are not a valid message (either end; it has a code and a status)
├── InputError              an array that cannot be sent or given back: its type, dtype or rank
├── InvalidArgument         a URL, name, timeout or header that no request can be made of
├── RefitIncomplete         of several layers some have their new weights; `done`, `layer`, `__cause__`
├── OutOfStep               of several servers some have the new weights; `done`, `failed`
├── TransportError          no answer came
│   ├── ConnectionFailed    refused, reset, name not resolved
│   └── TimedOut            the client's own timeout passed
└── ServerError             an error was answered; `status`, `code`, `expected`, `got`, `request_id`
    ├── BadRequest          400  the request is wrong; the message says what is needed
    ├── Unauthorized        401  no API key, or one the server does not know
    ├── Forbidden           403  the API key lacks the scope
    ├── NotFound            404  no such layer, version or route
    ├── Conflict            409  another version of the weights is being served
    ├── TooLarge            413  send fewer rows, or raise the server's limit
    ├── Unsupported         415  an encoding or media type that the server does not take
    ├── Overloaded          429, 503  try again after `retry_after` seconds
    ├── DeadlineExceeded    504  the deadline sent with the request passed first
    └── ServerFailed        500 and any other
        └── GatewayFailed   500, 502 of a proxy that lost the server: its answer did not come
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .facts import Refitted


class GemmwireError(Exception):
    """Base of every error that this package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is copied through its constructor, with the message alone.
        return _copy, (type(self), self.args, self.__dict__)


def _copy(
    kind: type[GemmwireError], args: tuple[object, ...], attributes: dict[str, object]
) -> GemmwireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class WireError(GemmwireError):
    """A message that breaks the protocol: what was given, what is needed, the way out.

    `code` names the rule for machines, `status` is the HTTP status a server answers with,
    `expected` and `got` repeat the two sides of the sentence.
    """

    def __init__(
        self, code: str, message: str, *, status: int = 400, expected: object = None, got: object = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.expected = expected
        self.got = got


class InputError(GemmwireError, TypeError):
    """An object that cannot become a tensor, or a tensor that cannot become such an object.

    The message says what is accepted and how to convert. `code` is `type_unsupported`, `dtype_unsupported`,
    `rank_unsupported`, `shape_unsupported`, `memory_unsupported` or `grad_unsupported`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidArgument(GemmwireError, ValueError):
    """An argument that no request can be made of; the message says what it must be."""


class RefitIncomplete(GemmwireError):
    """Of several layers, those in `done` have their new weights; `layer` and those behind it do not.

    `__cause__` says why. After a `TransportError` it is not known whether `layer` has its own: its version
    tells.
    """

    def __init__(self, message: str, *, layer: str, done: Mapping[str, Refitted]) -> None:
        super().__init__(message)
        self.layer = layer
        self.done = done

    @classmethod
    def at(
        cls, layer: str, done: Mapping[str, Refitted], layers: int, error: GemmwireError
    ) -> RefitIncomplete:
        return cls(
            f"{len(done)} of {layers} layers have their new weights; {layer!r} failed: {error}",
            layer=layer,
            done=done,
        )


class OutOfStep(GemmwireError):
    """Of several servers, those in `done` have the new weights of `layer`, and those in `failed` do not.

    Both by URL; `failed` says why. After a `TransportError` it is not known whether that server has them.
    """

    def __init__(
        self, message: str, *, layer: str, done: Mapping[str, Refitted], failed: Mapping[str, GemmwireError]
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.done = done
        self.failed = failed


class TransportError(GemmwireError):
    """No complete answer came back. The server may or may not have seen the request."""


class ConnectionFailed(TransportError):
    """The connection could not be made, or broke before the answer was complete.

    `passing`: the same call may work a moment later; not so with a client that is closed or a certificate
    that nobody vouches for.
    """

    def __init__(self, message: str, *, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


class TimedOut(TransportError):
    """The client's timeout passed before the answer was complete."""


class ServerError(GemmwireError):
    """The server answered, and the answer is an error.

    `status` is the HTTP status, `code` the server's name for the rule ("" from a proxy), `expected` and `got`
    are the two sides of the sentence, `retry_after` is in seconds.
    """

    statuses: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "",
        expected: object = None,
        got: object = None,
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.expected = expected
        self.got = got
        self.request_id = request_id
        self.retry_after = retry_after


class BadRequest(ServerError):
    statuses = (400,)


class Unauthorized(ServerError):
    statuses = (401,)


class Forbidden(ServerError):
    statuses = (403,)


class NotFound(ServerError):
    statuses = (404,)


class Conflict(ServerError):
    statuses = (409,)


class TooLarge(ServerError):
    statuses = (413,)


class Unsupported(ServerError):
    statuses = (415,)


class Overloaded(ServerError):
    statuses = (429, 503)


class DeadlineExceeded(ServerError):
    statuses = (504,)


class ServerFailed(ServerError):
    statuses = (500,)


class GatewayFailed(ServerFailed):
    """Something in between answered for a server that was gone, or went while it had the request."""


_BY_STATUS: dict[int, type[ServerError]] = {
    status: kind for kind in ServerError.__subclasses__() for status in kind.statuses
}


def for_status(status: int) -> type[ServerError]:
    """The class for an HTTP status; any that the tree does not name is a `ServerFailed`."""
    return _BY_STATUS.get(status, ServerFailed)
