"""Requests that a connection sends again, amid what else comes over it and to the server."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from gemmwire import wire
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.backlog import Answer
from gemmwire_service.call import Call
from gemmwire_service.head import parse_head
from gemmwire_service.repeat import Repeat
from gemmwire_service.response import encode
from http_calls import message
from links import GOOD, X, answers, ask, body_of, held, linked, request, statuses
from oracle import spread
from serving import Served, serving, settings, until


def test_in_the_body_of_another_it_is_part_of_that(fast: Served, repeated: list[Repeat]) -> None:
    """Guards: a request that is smuggled in the body of one that comes in pieces."""
    head = b"POST /v2/models/m.plain/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with linked(fast) as link:
        for _ in range(3):
            ask(link, GOOD)
        before = len(repeated)
        for piece in (head + b"%x\r\n" % len(GOOD), GOOD):
            link.sendall(piece)
            time.sleep(0.05)
        found = ask(link, b"\r\n0\r\n\r\n")
        assert statuses([found]) == [400]
        assert len(repeated) == before
        assert statuses([ask(link, GOOD)]) == [200]


def test_those_that_wait_keep_their_numbers(fast: Served, repeated: list[Repeat]) -> None:
    """Guards: x read out of the buffer that the next connection's request is received into."""
    sent = [request(*message(spread(3, 128, seed))) for seed in range(2)]
    with linked(fast) as one, linked(fast) as other:
        expected = [[ask(link, each) for each in sent for _ in range(2)] for link in (one, other)]
        before = len(repeated)
        with held(fast):
            for count, (link, each) in enumerate(zip((one, other), sent, strict=True), start=1):
                link.sendall(each)
                until(partial(waits, fast, count), "it did not come")
        assert len(repeated) == before + 2
        for index, link in enumerate((one, other)):
            assert body_of(answers(link, 1)[0])[1] == body_of(expected[index][2 * index])[1]


def waits(served: Served, count: int) -> bool:
    return served.engine.waiting == count


def test_one_that_finds_the_queue_full_is_refused(checkpoint: Path, repeated: list[Repeat]) -> None:
    options = settings(model=(f"m={checkpoint}",), max_queue=1)
    with serving(options) as served, linked(served) as link, linked(served) as other:
        assert statuses([ask(link, GOOD) for _ in range(3)]) == [200] * 3
        with held(served):
            other.sendall(GOOD)
            until(lambda: served.engine.waiting == 1, "the request did not come")
            found = ask(link, GOOD)
            assert (statuses([found]), body_of(found)[0]["code"]) == ([503], "queue_full")
        assert len(repeated) == 2
        assert statuses([*answers(other, 1), ask(link, GOOD)]) == [200, 200]
        assert (served.lane.begun, served.lane.held.total) == (0, 0)


def test_the_timer_of_what_came_before_does_not_end_it(checkpoint: Path, repeated: list[Repeat]) -> None:
    """Guards: a connection that is closed as idle while its request is under way."""
    options = settings(model=(f"m={checkpoint}",), keep_alive_s=1)
    with serving(options) as served, linked(served) as link:
        assert statuses([ask(link, GOOD) for _ in range(2)]) == [200, 200]
        ask(link, b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        with held(served):
            link.sendall(GOOD)
            until(lambda: served.engine.waiting == 1, "the request did not come")
            time.sleep(1.5)
        assert statuses(answers(link, 1)) == [200]
    assert len(repeated) == 1


@pytest.mark.parametrize("id", ["i" * length for length in range(0, 64, 8)])
def test_its_answer_is_as_long_as_it_says(id: str) -> None:
    """Guards: the lengths of an answer whose times had fewer digits, where no padding makes up for it."""
    spec = LayerSpec("m.plain", n=64, k=128, bias=False)
    head = parse_head(GOOD.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert head is not None
    body = memoryview(message(X)[0])
    call = Call(wire.Tensor("x", "FP32", (3, 128), body[head.offset :]), 3, "FP32", True, None, id)
    repeat = Repeat.of(head, spec, call, body)
    assert repeat is not None
    data = bytes(torch.zeros(3 * 64 * 4, dtype=torch.uint8))
    for times in (0, 10**9, 10**17):
        answer = Answer(data, 1, "b", 4, times, times)
        fields, buffers = encode(call, spec, 1, "b", answer)
        got_head, _, got = repeat.message(answer, b"").partition(b"\r\n\r\n")
        assert got == b"".join(buffers)
        assert f"content-length: {len(got)}" in got_head.decode().split("\r\n")
        assert all(f"{name}: {value}" in got_head.decode() for name, value in fields.items())
