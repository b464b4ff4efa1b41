"""One request on its way over several hosts, without I/O: each is asked at most once, and none waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from .balancer import Balancer, Lease
from .encode import buffers_size
from .errors import ConnectionFailed, GatewayFailed, GemmwireError, Overloaded, TimedOut
from .http1 import Reply, Request
from .replies import read_error, retry_after
from .url import Url

Outcome = Reply | GemmwireError

_HEAD_BYTES = 256  # about; so that requests without a body count too
_BEHIND = "version_behind"


class Failure(IntEnum):
    """Why another host may do better; the later, the sooner it passes."""

    VERSION = 1  # the host has not the version that is asked for
    LOST = 2
    BUSY = 3  # or not ready


class Attempt(NamedTuple):
    """What to send next, and to which host."""

    host: int
    request: Request
    timeout: float | None


class Round:
    """`advance`, send, `settle`, until `advance` says None; then `result`.

    Another host is asked where the connection failed, where the host is busy or not ready and another works,
    and where it does not serve the version that the request names. `timeout` (seconds) is for all of it.
    """

    def __init__(
        self, balancer: Balancer, urls: Sequence[Url], request: Request, timeout: float | None
    ) -> None:
        self._balancer = balancer
        self._urls = urls
        self._request = request
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout
        self._nbytes = _HEAD_BYTES + buffers_size(request.body)
        self._tried: set[int] = set()
        self._lease: Lease | None = None
        self._last: Outcome | None = None
        self._failures: list[tuple[Failure, Outcome]] = []

    def advance(self) -> Attempt | None:
        """The next attempt; None where there is to be none."""
        request, timeout, working = self._request, self._timeout, False
        if self._last is not None:
            if not self._failures or self._failures[-1][1] is not self._last or not request.repeatable:
                return None
            if self._end is not None:
                timeout = self._end - time.monotonic()
                if timeout <= 0:
                    return None
            request = request if request.again is None else request.again(timeout)
            # A host that is aside is worth a try where the connection to the last one failed, not for a 503.
            working = self._failures[-1][0] is not Failure.LOST
        self._lease = lease = self._balancer.pick(self._nbytes, self._tried, working=working)
        if lease is None:
            return None
        self._tried.add(lease.host)
        return Attempt(lease.host, addressed(request, self._urls[lease.host]), timeout)

    def settle(self, outcome: Outcome) -> None:
        """What came of the attempt."""
        self._last = outcome
        failure = _failure(outcome, self._request)
        if failure is not None:
            self._failures.append((failure, outcome))
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if failure in (Failure.BUSY, Failure.LOST) or isinstance(outcome, TimedOut):
            self._balancer.failed(lease, retry_after(outcome) if isinstance(outcome, Reply) else None)
        elif failure is None and isinstance(outcome, Reply) and _tells_of_work(self._request):
            self._balancer.answered(lease)
        else:
            self._balancer.dropped(lease)

    def abandon(self) -> None:
        """The attempt under way, if there is one, was given up."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._balancer.dropped(lease)

    def result(self) -> Reply:
        """The reply; raises the error. Of failures alone, that which passes soonest."""
        outcome = self._last
        if self._failures and self._failures[-1][1] is outcome:
            soonest = max(failure for failure, _ in self._failures)
            outcome = _joined([outcome for failure, outcome in self._failures if failure is soonest])
        if isinstance(outcome, Reply):
            return outcome
        raise outcome or RuntimeError("a round has no result before its first attempt")


def addressed(request: Request, url: Url) -> Request:
    """The request as this host is sent it."""
    headers = {"host": url.authority, **request.headers}
    path = url.prefix + request.path
    return Request(request.method, path, headers, request.body, request.repeatable, request.again)


def _failure(outcome: Outcome, request: Request) -> Failure | None:
    """None for an outcome that stands, be it an error."""
    if isinstance(outcome, GemmwireError):
        return Failure.LOST if isinstance(outcome, ConnectionFailed) and outcome.passing else None
    if outcome.status < 400:
        return None
    error = read_error(outcome)
    # During a rolling refit one host has a version already, or still, and another has not.
    if error.code == _BEHIND or (error.status == 404 and "/versions/" in request.path):
        return Failure.VERSION
    if isinstance(error, GatewayFailed):
        return Failure.LOST
    return Failure.BUSY if isinstance(error, Overloaded) else None


def _tells_of_work(request: Request) -> bool:
    """A server that is loading answers other questions."""
    return request.path.endswith(("/infer", "/ready"))


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The last one; where all are errors, one that names each."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, GemmwireError)]
    if len(errors) < 2 or len(errors) < len(outcomes):
        return outcomes[-1]
    return ConnectionFailed(f"none of {len(errors)} servers answered: {'; '.join(map(str, errors))}")
