"""Many calls at once: infer_many, threads and tasks."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from gemmwire import AsyncClient, Client, InvalidArgument, NotFound, Retries, TimedOut
from scripted_layer import B, K, W, X, layer
from scripted_server import Served, Session, answer, serve


def xs(count: int) -> list[Any]:
    return [np.full((1 + i % 7, K), i, np.float32) for i in range(count)]


def expected(x: Any) -> Any:
    return x @ W.T + B


def many(kind: str, url: str, calls: Any, **named: Any) -> list[Any]:
    """infer_many of either client."""
    options = {key: named.pop(key) for key in ("max_connections", "retries") if key in named}
    if kind == "threads":
        with Client(url, **options) as client:
            return client.infer_many(calls, **named)

    async def run() -> list[Any]:
        async with AsyncClient(url, **options) as client:
            return await client.infer_many(calls, **named)

    return asyncio.run(run())


either = pytest.mark.parametrize("kind", ["threads", "tasks"])


@either
@pytest.mark.parametrize(("connections", "at_once"), [(64, 8), (3, 8), (1, 8), (64, 1)])
def test_answers_come_in_the_order_of_the_calls(kind: str, connections: int, at_once: int) -> None:
    """Guards: answers that change places, and more connections than were allowed."""
    with serve(layer) as served:
        ys = many(kind, served.url, [("a", x) for x in xs(50)], max_connections=connections, at_once=at_once)
    assert [y.tolist() for y in ys] == [expected(x).tolist() for x in xs(50)]
    assert served.connections <= min(connections, at_once)


@either
@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["abcd"], r"calls\[0\] is 'abcd'; each has to be a pair: \[\(layer, x\)"),
        ([("a", X), ("a", X, 1)], r"calls\[1\] is of type tuple"),
        ([X], r"calls\[0\] is of type ndarray"),
        (7, "calls is of type int; pairs are needed"),
    ],
)
def test_what_is_no_pairs_is_refused(kind: str, calls: Any, words: str) -> None:
    """Guards: Python's complaint about unpacking, from somewhere inside."""
    with pytest.raises(InvalidArgument, match=words):
        many(kind, "http://127.0.0.1:1", calls)


@either
def test_requests_go_out_before_the_first_answer_has_come(kind: str) -> None:
    """Guards: one call after the other by another name."""
    together = threading.Barrier(5, timeout=20)

    def script(session: Session, served: Served) -> None:
        together.wait()
        layer(session, served)

    with serve(script) as served:
        ys = many(kind, served.url, [("a", x) for x in xs(5)], at_once=5)
    assert len(ys) == 5


@either
def test_no_calls_have_no_answers(kind: str) -> None:
    assert many(kind, "http://127.0.0.1:9", []) == []


@either
@pytest.mark.parametrize("retries", [Retries(2, delay=0.001), 0], ids=["retried", "not-retried"])
def test_one_failure_among_many_is_tried_again_or_raised(kind: str, retries: Any) -> None:
    """Guards: an error in place of an array in the list of answers."""
    once = threading.Semaphore(1)

    def script(session: Session, served: Served) -> None:
        if once.acquire(blocking=False):
            session.request()
            session.send(answer(b'{"error": "no such layer"}', status="503 Busy" if retries else "404 No"))
        layer(session, served)

    with serve(script) as served:
        if retries:
            ys = many(kind, served.url, [("a", x) for x in xs(20)], retries=retries)
            assert [y.tolist() for y in ys] == [expected(x).tolist() for x in xs(20)]
        else:
            with pytest.raises(NotFound, match="no such layer"):
                many(kind, served.url, [("a", x) for x in xs(20)], retries=retries)


@either
def test_the_timeout_is_for_all_of_them(kind: str) -> None:
    """Guards: a timeout of a second that takes one for each call."""
    done = threading.Event()

    def script(session: Session, served: Served) -> None:
        while session.request() is not None:
            done.wait(20)

    with serve(script) as served:
        with pytest.raises(TimedOut):
            many(kind, served.url, [("a", x) for x in xs(30)], timeout=0.3, at_once=2)
        done.set()
    assert served.connections <= 4


def test_threads_that_share_few_connections_do_not_wait_for_each_other_for_ever() -> None:
    """Guards: two infer_many that each hold some of the connections and wait for the rest."""
    failures: list[object] = []

    def work(client: Client) -> None:
        for _ in range(5):
            ys = client.infer_many([("a", x) for x in xs(12)], timeout=20)
            failures.extend(y for x, y in zip(xs(12), ys, strict=True) if not np.array_equal(y, expected(x)))

    with serve(layer) as served, Client(served.url, max_connections=3) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert served.connections <= 3


@pytest.mark.parametrize("at_once", [0, 1.5, True])
def test_a_window_that_is_none_is_refused(at_once: Any) -> None:
    with pytest.raises(InvalidArgument, match="at_once is"):
        Client().infer_many([("a", X)], at_once=at_once)
