"""One call on its way through its failures, without I/O: what to send next, how long to wait before that."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Generic, TypeVar

from .base import Exchange
from .errors import Conflict, GatewayFailed, GemmwireError, Overloaded, TransportError
from .http1 import Reply, Request
from .retries import Retries

T = TypeVar("T")

RETRIED = (TransportError, Overloaded, GatewayFailed)
_PERHAPS_DONE = ("", "unavailable", "device_lost")  # codes; "unavailable" is that of deploy/nginx
_LEAST_S = 1e-3  # a time that has passed, as a timeout that does


class Call(Generic[T]):
    """`request` and `timeout` are of the next attempt, once `failed` has let there be one."""

    def __init__(self, exchange: Exchange[T], retries: Retries) -> None:
        self._exchange = exchange
        self._retries = retries
        self._failures = 0
        # An attempt of which nobody knows what became.
        self._lost: GemmwireError | None = None
        self._end = None if exchange.timeout is None else time.monotonic() + exchange.timeout
        self.timeout = exchange.timeout

    @property
    def request(self) -> Request:
        return self._exchange.request(self.timeout)

    def resume(self) -> None:
        """It has waited for its turn, which takes of its time."""
        if self._end is not None:
            self.timeout = max(_LEAST_S, self._end - time.monotonic())

    def read(self, reply: Reply) -> T:
        """Errors: as `Exchange.read`; those of RETRIED go to `failed`."""
        try:
            return self._exchange.read(reply)
        except Conflict as conflict:
            if self._lost is not None:
                raise _perhaps_ours(conflict, self._lost) from self._lost
            raise

    def failed(self, error: GemmwireError) -> float:
        """Seconds to wait before the next attempt. Raises the error where there is to be none."""
        self._failures += 1
        if _is_lost(error):
            self._lost = error
        seconds = self._retries.wait(self._failures, error) if self._exchange.retried else None
        if seconds is None:
            raise error
        if self._end is not None:
            self.timeout = self._end - time.monotonic() - seconds
            if self.timeout <= 0:
                raise error
        return seconds


def calls_at(urls: Iterable[str], exchange: Exchange[T], retries: Retries) -> dict[str, Call[T]]:
    """The same call for each server, one time for all of them; `resume` one when its turn has come."""
    return {url: Call(exchange, retries) for url in urls}


def _is_lost(error: GemmwireError) -> bool:
    """Whether the server may have done what it was asked. A 503 is its word that it has not, unless it is a
    proxy's, or the device was lost."""
    if isinstance(error, Overloaded):
        return error.status == 503 and error.code in _PERHAPS_DONE
    return isinstance(error, (TransportError, GatewayFailed))


def _perhaps_ours(conflict: Conflict, lost: GemmwireError) -> Conflict:
    return Conflict(
        f"{conflict}. An attempt before this one had no answer ({lost}), so the version that is served "
        "may be its result: compare what it answers before you send the weight again",
        status=conflict.status,
        code=conflict.code,
        expected=conflict.expected,
        got=conflict.got,
        request_id=conflict.request_id,
    )
