"""One request on its way over several hosts: who is asked next, and what the caller is told at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gemmwire import rounds
from gemmwire.balancer import Balancer
from gemmwire.errors import ConnectionFailed, GemmwireError, TimedOut, WireError
from gemmwire.http1 import Reply, Request
from gemmwire.rounds import Outcome, Round
from gemmwire.url import parse_urls

URLS = parse_urls(["http://a:1/p", "https://b", "unix:///s"])
INFER = Request("POST", "/v2/models/m/infer", {"x-a": "1"}, [b"12", bytearray(3)])
PINNED = replace(INFER, path="/v2/models/m/versions/3/infer")
REFIT = replace(INFER, method="PUT", repeatable=False)
LOST = ConnectionFailed("reset")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(rounds, "time", self)

    def monotonic(self) -> float:
        return self.now


def reply(status: int = 200, **headers: str) -> Reply:
    return Reply(status, {name.replace("_", "-"): value for name, value in headers.items()}, bytearray())


def play(
    outcomes: Sequence[Outcome], request: Request = INFER, balancer: Balancer | None = None
) -> tuple[list[int], Outcome]:
    """-> the hosts that were asked, and how it ended; outcomes that are left over fail the test."""
    round_ = Round(balancer or Balancer(len(URLS)), URLS, request, 10.0)
    hosts, left = [], list(outcomes)
    while (attempt := round_.advance()) is not None:
        hosts.append(attempt.host)
        round_.settle(left.pop(0))
    assert left == []
    try:
        return hosts, round_.result()
    except GemmwireError as error:
        return hosts, error


GOOD, BUSY, NONE = reply(), reply(503), reply(404)
BAD = Reply(500, {}, bytearray(b'{"error": "the device raised", "code": "device_failed"}'))
BEHIND = Reply(503, {"retry-after": "1"}, bytearray(b'{"error": "is in 2", "code": "version_behind"}'))


@pytest.mark.parametrize(
    ("outcomes", "last"),
    [
        pytest.param([GOOD], GOOD, id="answered"),
        pytest.param([LOST, GOOD], GOOD, id="lost"),
        pytest.param([LOST, LOST, GOOD], GOOD, id="lost-twice"),
        pytest.param([BUSY, GOOD], GOOD, id="busy"),
        pytest.param([reply(429), GOOD], GOOD, id="too-many"),
        pytest.param([BUSY, LOST, GOOD], GOOD, id="busy-and-lost"),
        pytest.param([reply(502), GOOD], GOOD, id="a-proxy-lost-it"),
        pytest.param([BAD], BAD, id="server-error"),
        pytest.param([NONE], NONE, id="no-such-layer"),
        pytest.param([BUSY, BAD], BAD, id="busy-then-error"),
        pytest.param([BUSY, LOST, LOST], BUSY, id="busy-passes-sooner-than-lost"),
        pytest.param([BUSY, BUSY, BUSY], BUSY, id="all-busy"),
    ],
)
def test_each_host_is_asked_once_while_another_may_do_better(outcomes: list[Outcome], last: Outcome) -> None:
    hosts, ended = play(outcomes)
    assert hosts == list(range(len(outcomes)))
    assert ended is last


@pytest.mark.parametrize(
    "error",
    [TimedOut("late"), ConnectionFailed("closed", passing=False), WireError("http_invalid", "no HTTP")],
    ids=["time", "client-closed-or-certificate", "garbage"],
)
def test_what_another_host_cannot_mend_is_the_answer(error: GemmwireError) -> None:
    """Guards: a certificate that nobody vouches for, passed over in silence."""
    assert play([error]) == ([0], error)


def test_a_host_that_let_a_call_time_out_is_set_aside() -> None:
    """Guards: a host that hangs, which looks idle as soon as its calls are given up."""
    balancer = Balancer(2)
    play([TimedOut("late")], balancer=balancer)
    assert [host.failures for host in balancer._hosts] == [1, 0]


def test_where_all_are_lost_the_error_names_each() -> None:
    _, ended = play([ConnectionFailed("a is off"), ConnectionFailed("b too"), ConnectionFailed("s also")])
    assert isinstance(ended, ConnectionFailed)
    assert ended.passing
    assert str(ended) == "none of 3 servers answered: a is off; b too; s also"


def test_a_version_that_one_host_does_not_serve_is_asked_of_another() -> None:
    """Guards: a rolling refit under which calls for one version fail every other time."""
    assert play([NONE, GOOD], PINNED) == ([0, 1], GOOD)
    assert play([NONE, NONE, NONE], PINNED)[1] is NONE
    assert play([NONE, BUSY, NONE], PINNED)[1] is BUSY
    ended = play([NONE, LOST, NONE], PINNED)[1]
    assert ended is LOST  # which may have it


def test_a_host_that_is_behind_works_for_others() -> None:
    """Guards: a host aside for a second whenever one caller is ahead of it."""
    balancer = Balancer(2)
    assert play([BEHIND, GOOD], balancer=balancer) == ([0, 1], GOOD)
    assert [host.failures for host in balancer._hosts] == [0, 0]
    assert play([BEHIND, BEHIND], balancer=balancer)[1] is BEHIND


def test_what_must_not_be_repeated_goes_to_one_host() -> None:
    assert play([LOST], REFIT) == ([0], LOST)


def test_a_busy_host_does_not_send_the_call_to_one_that_is_aside() -> None:
    """Guards: seconds in the wait for a machine that is off, in place of a 503 at once."""
    balancer = Balancer(len(URLS))
    play([LOST, LOST, GOOD], balancer=balancer)
    assert play([BUSY], balancer=balancer) == ([2], BUSY)


def test_a_lost_host_does_for_it_may_have_come_back() -> None:
    """Guards: a call that is lost though a host works, which nobody has tried again."""
    balancer = Balancer(len(URLS), jitter=lambda low, high: low)
    play([LOST, LOST, GOOD], balancer=balancer)
    hosts, ended = play([LOST, GOOD], balancer=balancer)
    assert (hosts, ended) == ([2, 0], GOOD)


def test_the_next_request_avoids_the_host_that_was_busy_for_as_long_as_it_asks() -> None:
    balancer = Balancer(2, clock=lambda: 0.0, jitter=lambda low, high: low)
    play([reply(503, retry_after="7"), GOOD], balancer=balancer)
    assert [host.until for host in balancer._hosts] == [7.0, 0.0]
    assert play([GOOD], balancer=balancer)[0] == [1]


@pytest.mark.parametrize(("path", "failures"), [("/v2/health/live", 1), ("/v2/health/ready", 0)])
def test_to_be_alive_is_not_to_work(path: str, failures: int) -> None:
    """Guards: a host that loads for minutes, back in use because it answered that it lives."""
    balancer = Balancer(1)
    play([BUSY], balancer=balancer)
    play([GOOD], replace(INFER, method="GET", path=path), balancer=balancer)
    assert balancer._hosts[0].failures == failures


def test_each_host_is_addressed_as_it_is() -> None:
    """Guards: a virtual host or a path of another server."""
    round_ = Round(Balancer(3), URLS, INFER, None)
    seen = []
    while (attempt := round_.advance()) is not None:
        seen.append((attempt.request.path, attempt.request.headers, attempt.timeout))
        round_.settle(LOST)
    path = INFER.path
    assert seen == [
        ("/p" + path, {"host": "a:1", "x-a": "1"}, None),
        (path, {"host": "b", "x-a": "1"}, None),
        (path, {"host": "localhost", "x-a": "1"}, None),
    ]


def test_the_next_host_is_told_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a server that computes for somebody who has gone, and a timeout that begins anew."""
    clock = Clock(monkeypatch)
    made: list[Any] = []

    def again(seconds: float | None) -> Request:
        made.append(seconds)
        return replace(INFER, body=[b"%r" % seconds], again=again)

    round_ = Round(Balancer(3), URLS, replace(INFER, again=again), 10.0)
    first = round_.advance()
    assert first is not None
    assert (first.timeout, made) == (10.0, [])
    clock.now += 4.0
    round_.settle(LOST)
    second = round_.advance()
    assert second is not None
    assert (second.timeout, made, second.request.body) == (6.0, [6.0], [b"6.0"])
    clock.now += 6.0
    round_.settle(LOST)
    assert round_.advance() is None
    with pytest.raises(ConnectionFailed):
        round_.result()


def test_the_bytes_of_all_buffers_are_outstanding_until_it_ends() -> None:
    balancer = Balancer(2)
    round_ = Round(balancer, URLS[:2], replace(INFER, body=[b"ab", memoryview(bytearray(1000))]), None)
    round_.advance()
    assert [host.outstanding for host in balancer._hosts] == [1258, 0]
    round_.settle(LOST)
    round_.advance()
    assert [host.outstanding for host in balancer._hosts] == [0, 1258]
    round_.abandon()
    round_.abandon()
    assert [host.outstanding for host in balancer._hosts] == [0, 0]
