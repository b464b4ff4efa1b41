"""Which requests are logged, and with what."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmwire_service.request_log import RequestLog
from gemmwire_service.traffic import Finished
from http_calls import call, infer, message
from serving import Served, hold, serving, settings


@contextmanager
def logged(checkpoint: Path, **fields: object) -> Iterator[Served]:
    with serving(settings(model=(f"m={checkpoint}",), **fields)) as served:
        yield served


def facts(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["facts"] for record in caplog.records if record.name == "gemmwire.requests"]


def body() -> tuple[bytes, int]:
    return message(torch.ones(3, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("fast_path", [True, False])
def test_every_request_is_logged_once_if_asked(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, fast_path: bool
) -> None:
    """Guards: a path that is not logged, and an infer request with two lines."""
    caplog.set_level(logging.INFO)
    data, length = body()
    with logged(checkpoint, access_log=True, fast_path=fast_path) as served:
        assert infer(served, "m.plain", data, length, x_request_id="abc-1").status == 200
        assert infer(served, "m.none", data, length, x_request_id="abc-2").status == 404
        assert call(served, "GET", "/v2/models/m.none", headers={"X-Request-Id": "abc-3"}).status == 404
    first, second, third = facts(caplog)
    assert {"request_id": "abc-1", "layer": "m.plain", "status": 200, "rows": 3}.items() <= first.items()
    stages = ("receive_us", "queue_us", "device_us", "send_us")
    assert 0 <= first["total_us"] - sum(first[stage] for stage in stages) <= len(stages)
    assert {
        "request_id": "abc-2",
        "layer": "",
        "status": 404,
        "reason": "layer_unknown",
    }.items() <= second.items()
    assert {"request_id": "abc-3", "path": "/v2/models/m.none", "status": 404}.items() <= third.items()


def test_without_being_asked_answers_are_not_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    data, length = body()
    with logged(checkpoint) as served:
        assert infer(served, "m.plain", data, length).status == 200
        assert infer(served, "m.none", data, length).status == 404
        assert call(served, "GET", "/v2").status == 200
    assert facts(caplog) == []


def test_a_failure_is_logged_with_its_id(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, length = body()
    with logged(checkpoint) as served:
        gate = threading.Event()
        hold(served.engine, gate)
        try:
            late, late_length = message(
                torch.ones(3, 128, dtype=torch.bfloat16), parameters={"timeout": 1000}
            )
            assert infer(served, "m.plain", late, late_length, x_request_id="late-1").status == 504
        finally:
            gate.set()
        assert infer(served, "m.plain", data, length).status == 200
    (failed,) = facts(caplog)
    wanted = {"request_id": "late-1", "layer": "m.plain", "status": 504, "reason": "deadline_exceeded"}
    assert wanted.items() <= failed.items()


def test_a_slow_answer_is_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    data, length = body()
    with logged(checkpoint, slow_request_ms=1) as served:
        gate = threading.Event()
        hold(served.engine, gate)
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        assert infer(served, "m.plain", data, length, x_request_id="slow-1").status == 200
        timer.join()
    slow = [each for each in facts(caplog) if each["request_id"] == "slow-1"]
    assert len(slow) == 1
    assert slow[0]["queue_us"] >= 1000


def finished(status: int) -> Finished:
    return Finished("m.a", status, "queue_full", {}, 0, 5000, None)


def test_thousands_of_failures_are_some_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an overload that the log makes worse."""
    now = 100.0
    monkeypatch.setattr("gemmwire_service.request_log.time.monotonic", lambda: now)
    report = RequestLog(1 << 60, everything=False)
    for _ in range(5000):
        report(finished(503))
    assert len(facts(caplog)) == 20
    now = 101.0
    report(finished(503))
    assert facts(caplog)[20:][0] == {"unsaid": 4980}
    assert len(facts(caplog)) == 22
