"""Bytes that are no HTTP behind requests that are: each answer is its own request, the refusal is last."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from links import GOOD, answers, held, linked, statuses
from serving import Served, serving, settings, until

GARBAGE = b"\x16\x03\x01 no request\r\n\r\n"
CHUNKED = b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(params=(True, False), ids=("fast-path", "asgi"))
def served(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(settings(model=(f"m={checkpoint}",), fast_path=request.param)) as running:
        yield running


def assert_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert statuses([answer]) == [400]
    assert b"connection: close" in head.lower()
    assert json.loads(body)["code"] == "http_invalid"


def assert_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


@pytest.mark.parametrize(
    "wrong",
    [GARBAGE, CHUNKED + b"ZZ\r\n", LIVE + CHUNKED + b"ZZ\r\n"],
    ids=["head", "chunk", "behind-another"],
)
def test_a_refusal_waits_for_the_answers_before_it(
    served: Served, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a 400 that a client takes for the answer to its request, and an answer that nobody gets."""
    good = [200] * (2 if wrong.startswith(LIVE) else 1)
    with linked(served) as link:
        with held(served):
            link.sendall(GOOD)
            until(lambda: served.engine.waiting == 1, "the request did not arrive")
            link.sendall(wrong)
        found = answers(link, len(good) + 1)
        assert statuses(found[:-1]) == good
        assert_refused(found[-1])
        assert link.recv(1) == b""
    assert_no_fault(caplog)


def test_what_follows_the_last_request_costs_it_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: an answer that is lost to bytes behind it, and a traceback that anybody can have logged."""
    with linked(served) as link:
        link.sendall(LAST + b"more")
        assert statuses(answers(link, 1)) == [200]
        assert link.recv(1) == b""
    assert_no_fault(caplog)


@pytest.mark.parametrize("wrong", [GARBAGE, CHUNKED + b"ZZ\r\n"], ids=["head", "chunk"])
def test_alone_it_is_refused_at_once(served: Served, wrong: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with linked(served) as link:
        link.sendall(wrong)
        assert_refused(answers(link, 1)[0])
        assert link.recv(1) == b""
    until(lambda: served.lane.connections == 0, "the connection is still there")
    assert_no_fault(caplog)


def test_it_is_counted_and_not_said(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Guards: a log that a stranger fills the disk with."""
    before = served.lane.infer.traffic.rejects.get("http_invalid", 0)
    for wrong in (GARBAGE, CHUNKED + b"ZZ\r\n", b"POST " + b"/" * 80_000):
        with linked(served) as link, suppress(ConnectionError):
            link.sendall(wrong)
            answers(link, 1)
    rejects = served.lane.infer.traffic.rejects
    assert (rejects["http_invalid"] - before, rejects["head_too_large"]) == (2, 1)
    assert caplog.messages == []
