"""A wall clock that is set, by a day and back: nothing that is timed hears of it."""

from __future__ import annotations

import ast
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from http_calls import infer, message
from links import GOOD, answers, held, linked, statuses
from serving import serving, settings, until
from source_tree import CLIENT, SERVICE, modules, relative

# Who may ask for the wall clock: times that people read, and ages of files, which are in that clock too.
WALL = {
    "service/gemmwire_service/traffic.py",
    "service/gemmwire_service/status.py",
    "service/gemmwire_service/stats.py",
    "service/gemmwire_service/tracing.py",
    "service/gemmwire_service/checkpoint/weight_cache.py",
    "service/gemmwire_service/refit_folder.py",  # beside the time of a file, as the cache
}
ASKS = {"time", "time_ns", "now", "utcnow", "today"}


class Clock:
    """time.time, set by `ahead` seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._real = time.time

    def __call__(self) -> float:
        return self._real() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "time", made)
    monkeypatch.setattr(time, "time_ns", lambda: int(made() * 1e9))
    return made


@pytest.mark.parametrize("fast", [True, False], ids=["fast-path", "asgi"])
@pytest.mark.parametrize("days", [1.0, -1.0, 10_000.0], ids=["forward", "back", "decades"])
def test_deadlines_and_connections_do_not_follow_the_wall_clock(
    checkpoint: Path, clock: Clock, fast: bool, days: float
) -> None:
    """Guards: requests that expire all at once, or never, and connections that end, as NTP sets a clock."""
    body, length = message(torch.ones(1, 128))
    options = settings(model=(f"m={checkpoint}",), keep_alive_s=30, stall_s=30, fast_path=fast)
    with (
        serving(options) as served,
        linked(served) as idle,
        linked(served) as half,
        ThreadPoolExecutor(2) as pool,
    ):
        idle.sendall(GOOD)
        assert statuses(answers(idle, 1)) == [200]
        half.sendall(GOOD[:-7])
        with held(served):
            patient = pool.submit(infer, served, "m.plain", body, length, gemmwire_timeout_us="60000000")
            until(lambda: served.engine.waiting == 1, "the request did not arrive")
            clock.ahead = days * 86400
            brief = infer(served, "m.plain", body, length, gemmwire_timeout_us="50000")
            assert brief.status == 504
        assert patient.result().status == 200
        idle.sendall(GOOD)
        half.sendall(GOOD[-7:])
        assert [statuses(answers(link, 1)) for link in (idle, half)] == [[200], [200]]


def test_the_wall_clock_is_asked_for_what_people_read_alone() -> None:
    """Guards: a duration that is the difference of two wall clocks."""
    found = {relative(path) for path in modules(CLIENT, SERVICE) if _asks(path)}
    assert found <= WALL


def _asks(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in ASKS
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
        for node in ast.walk(ast.parse(path.read_text()))
    )
