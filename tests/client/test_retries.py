"""What a client tries again, when, and what it must not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from gemmwire import (
    Client,
    Conflict,
    ConnectionFailed,
    GatewayFailed,
    InvalidArgument,
    Overloaded,
    Retries,
    ServerFailed,
    TimedOut,
)
from gemmwire.http1 import Reply, Request
from gemmwire.replies import read_error
from gemmwire.retries import retries_of
from scripted_layer import Computing, Recorded, W, X, Y, client
from scripted_server import Served, Session, answer, serve

QUICK = Retries(2, delay=0.001)
REFITTED = {"name": "a", "version": "4", "previous_version": "3"}


class Failing(Computing):
    """The layer, after failures: an exception is raised, a reply given, a status answered in words."""

    def __init__(self, *failures: Exception | Reply | int, after: Reply | None = None) -> None:
        super().__init__()
        self.failures = list(failures)
        self.after = after

    def send(self, request: Request, timeout: float | None) -> Reply:
        if not self.failures:
            if self.after is None:
                return super().send(request, timeout)
            return Recorded.send(self, request, timeout) and self.after
        self.requests.append(request)
        self.timeouts.append(timeout)
        failure = self.failures.pop(0)
        if isinstance(failure, Exception):
            raise failure
        if isinstance(failure, Reply):
            return failure
        return Reply(failure, {}, bytearray(b'{"error": "no"}'))


def deadline_us(request: Request) -> int:
    head = bytes(request.body[0])
    timeout: int = json.loads(head)["parameters"]["timeout"]
    return timeout


@pytest.mark.parametrize(
    "failure", [ConnectionFailed("reset"), 429, 503], ids=["connection", "too-many", "unavailable"]
)
def test_a_failure_that_passes_is_tried_again(failure: Exception | int) -> None:
    """Guards: a training run that ends because a server was restarted."""
    transport = Failing(failure, failure)
    assert np.array_equal(client(transport, retries=QUICK).infer("a", X), Y)
    assert len(transport.requests) == 3


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_that_a_proxy_lost_is_asked_again(status: int) -> None:
    """Guards: a call that fails because one replica of many was killed while it computed it."""
    transport = Failing(lost := Reply(status, {}, bytearray(b"<h1>Internal Server Error</h1>")), lost)
    assert np.array_equal(client(transport, retries=QUICK).infer("a", X), Y)
    transport = Failing(lost, lost, lost)
    with pytest.raises(GatewayFailed, match="Internal Server Error"):
        client(transport, retries=QUICK).infer("a", X)


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (503, b'{"error": "A server was lost", "code": "unavailable"}', True),
        (503, b"<h1>Service Unavailable</h1>", True),
        (503, b'{"error": "no device", "code": "device_lost"}', True),
        (503, b'{"error": "loading", "code": "not_ready"}', False),
        (429, b"", False),
    ],
)
def test_a_refit_that_a_503_leaves_open_may_have_been_done(status: int, body: bytes, told: bool) -> None:
    """Guards: a conflict with one's own first attempt, behind a proxy that says 503 for what it lost."""
    conflict = Reply(409, {}, bytearray(b'{"error": "Version 4", "code": "version_conflict"}'))
    transport = Failing(Reply(status, {}, bytearray(body)), after=conflict)
    with pytest.raises(Conflict) as caught:
        client(transport, retries=QUICK).refit("a", W, if_version=3)
    assert ("may be its result" in str(caught.value)) is told


def test_a_refit_that_a_proxy_lost_may_have_been_done() -> None:
    """Guards: a conflict with one's own first attempt, taken for somebody else's."""
    lost = Reply(502, {}, bytearray(b"Bad Gateway"))
    conflict = Reply(409, {}, bytearray(b'{"error": "Version 4", "code": "version_conflict"}'))
    transport = Failing(lost, after=conflict)
    with pytest.raises(Conflict, match="may be its result"):
        client(transport, retries=QUICK).refit("a", W, if_version=3)
    transport = Failing(lost)
    with pytest.raises(GatewayFailed):
        client(transport, retries=QUICK).refit("a", W)
    assert len(transport.requests) == 1


def test_one_failure_more_than_retries_is_the_answer() -> None:
    transport = Failing(503, 503, 503)
    with pytest.raises(Overloaded):
        client(transport, retries=QUICK).infer("a", X)
    assert len(transport.requests) == 3


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        pytest.param(500, ServerFailed, id="server-error"),
        pytest.param(TimedOut("late"), TimedOut, id="timed-out"),
        pytest.param(ConnectionFailed("closed", passing=False), ConnectionFailed, id="closed"),
    ],
)
def test_what_will_not_pass_is_not_tried_again(failure: Exception | int, kind: type[Exception]) -> None:
    """Guards: three times the wait for the same answer."""
    transport = Failing(failure)
    with pytest.raises(kind):
        client(transport, retries=QUICK).infer("a", X)
    assert len(transport.requests) == 1


def test_all_attempts_share_one_timeout_which_the_server_is_told() -> None:
    """Guards: a timeout of a minute that takes three, and a server that computes for nobody."""
    transport = Failing(503, 503)
    client(transport, retries=Retries(2, delay=0.02)).infer("a", X, timeout=10)
    left = [timeout for timeout in transport.timeouts if timeout is not None]
    assert left[0] == 10
    assert left[0] - 0.02 >= left[1] >= left[2] + 0.04
    told = [deadline_us(request) for request in transport.requests]
    assert told == [round(seconds * 1e6) for seconds in left]


def test_no_attempt_is_made_that_the_timeout_would_end() -> None:
    """Guards: a sleep that is longer than what the caller waits for."""
    transport = Failing(503)
    with pytest.raises(Overloaded):
        client(transport, retries=Retries(3, delay=60), timeout=5).infer("a", X)
    assert len(transport.requests) == 1


def test_the_server_s_wish_is_respected_with_jitter() -> None:
    """Guards: clients that all come back in the same moment, before the server wants them."""
    asked = Overloaded("later", status=503, retry_after=7.0)
    waits = {Retries(9).wait(1, asked) or 0.0 for _ in range(50)}
    assert min(waits) >= 7.0
    assert max(waits) <= 10.5
    assert len(waits) > 40


def test_waits_double_up_to_the_longest() -> None:
    retries = Retries(20, delay=0.1, longest=2.0)
    waits = [retries.wait(failures, ConnectionFailed("x")) or 0.0 for failures in range(1, 12)]
    for failures, seconds in enumerate(waits):
        least = min(2.0, 0.1 * 2**failures)
        assert least <= seconds <= 1.5 * least
    assert retries.wait(21, ConnectionFailed("x")) is None


def test_a_long_outage_is_waited_out() -> None:
    """Guards: an OverflowError at the 1025th attempt, in place of the answer after it."""
    assert 5.0 <= (Retries(5000).wait(4000, ConnectionFailed("x")) or 0.0) <= 7.5


def test_a_wait_for_ever_is_one_that_a_system_can_sleep() -> None:
    """Guards: an OverflowError of time.sleep, where a server asks for a wait beyond all numbers."""
    error = read_error(Reply(503, {"retry-after": "9" * 400}, bytearray()))
    assert (Retries(1).wait(1, error) or 0.0) <= 1.5e6


def test_a_refit_is_tried_again_with_its_version_only() -> None:
    """Guards: a weight that is replaced twice, over the one that somebody else sent in between."""
    body = Reply(200, {}, bytearray(json.dumps(REFITTED).encode()))
    transport = Failing(ConnectionFailed("reset"), after=body)
    assert client(transport, retries=QUICK).refit("a", W, if_version=3).version == "4"
    assert [request.headers["if-match"] for request in transport.requests] == ["3", "3"]

    transport = Failing(ConnectionFailed("reset"), after=body)
    with pytest.raises(ConnectionFailed):
        client(transport, retries=QUICK).refit("a", W)
    assert len(transport.requests) == 1


def test_a_conflict_behind_a_lost_answer_says_that_it_may_be_ours() -> None:
    """Guards: a refit that was done, reported as if another had been."""
    conflict = Reply(409, {}, bytearray(b'{"error": "is in version 4", "code": "version_conflict"}'))
    transport = Failing(ConnectionFailed("reset"), after=conflict)
    with pytest.raises(Conflict, match="may be its result") as caught:
        client(transport, retries=QUICK).refit("a", W, if_version=3)
    assert caught.value.code == "version_conflict"

    with pytest.raises(Conflict) as caught:
        client(Failing(after=conflict), retries=QUICK).refit("a", W, if_version=3)
    assert "its result" not in str(caught.value)


def test_a_server_that_comes_back_is_found_over_a_socket() -> None:
    """Guards: retries that work with a fake transport only."""

    def script(session: Session, served: Served) -> None:
        request = session.request()
        assert request is not None
        served.requests.append(request)
        if len(served.requests) > 2:
            session.send(answer(b"{}"))

    with serve(script) as served, Client(served.url, retries=QUICK) as c:
        assert c.ready()
    assert len(served.requests) == 3


@pytest.mark.parametrize("value", [-1, True, 1.5, "3", None], ids=repr)
def test_retries_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="retries is"):
        Client(retries=value)


@pytest.mark.parametrize("fields", [{"attempts": -1}, {"delay": -1.0}, {"longest": "x"}], ids=str)
def test_a_policy_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(fields))):
        Retries(**fields)


def test_a_number_is_the_default_policy_with_so_many_attempts() -> None:
    assert retries_of(5) == Retries(attempts=5)
