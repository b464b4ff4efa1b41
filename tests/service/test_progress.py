"""What a waiting person sees: a bar that is redrawn, or lines that a log can hold."""

from __future__ import annotations

import io
import logging

import pytest

from gemmwire_service.progress import Progress, size


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_elsewhere_each_tenth_is_one_plain_line() -> None:
    """Guards: a log of control characters, or of a line a tensor."""
    lines, clock = list[str](), Clock()
    with Progress("loading", 1000, 100, stream=io.StringIO(), write=lines.append, clock=clock) as progress:
        for i in range(100):
            clock.now += 1
            progress.add(f"layer {i}", 10, layers=1)
    assert lines == [
        f"loading: {10 * i} %, {size(100 * i)} of 1.0 kB, {10 * i} of 100 layers, 10 B/s, "
        f"{(100 - 10 * i) // 60}:{(100 - 10 * i) % 60:02d} left"
        for i in range(1, 11)
    ]


def test_a_line_goes_to_the_stream_by_default() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("loading", 10, 1, stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.add("m", 10, layers=1)
    assert stream.getvalue() == "loading: 100 %, 10 B of 10 B, 1 of 1 layers, 5 B/s, 0:00 left\n"


def test_what_is_done_at_once_says_nothing() -> None:
    """Guards: ten lines about a model that is loaded before they can be read."""
    stream, clock = io.StringIO(), Clock()
    with Progress("loading", 100, 10, stream=stream, clock=clock) as progress:
        for _ in range(10):
            clock.now += 0.1
            progress.add("m", 10, layers=1)
    assert stream.getvalue() == ""


def test_a_log_line_is_not_written_behind_the_bar(caplog: pytest.LogCaptureFixture) -> None:
    stream, clock = Terminal(), Clock()
    log = logging.getLogger("gemmwire.test")
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with Progress("loading", 100, 10, stream=stream, clock=clock) as progress:
            clock.now += 1
            progress.add("m", 10)
            log.warning("be warned")
        log.warning("after")
    finally:
        logging.getLogger().removeHandler(handler)
    shown = stream.getvalue()
    assert "left" not in shown.rpartition("be warned")[0].rpartition("\x1b[K")[2]
    assert "\r\x1b[Kbe warned\n" in shown
    assert shown.endswith("\r\x1b[Kafter\n")
    assert handler.filters == []


def test_on_a_terminal_one_line_is_redrawn_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: what is printed afterwards behind the remains of a bar."""
    monkeypatch.setenv("COLUMNS", "200")
    stream, clock = Terminal(), Clock()
    with Progress("loading", 2000, 2, stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.add("m", 1000, layers=1)
        assert stream.getvalue() == (
            "\r\x1b[Kloading [############------------]   1.0 kB of 2.0 kB, 1 of 2 layers, "
            "500 B/s, 0:02 left  m"
        )
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_it_is_not_drawn_more_often_than_it_can_be_seen() -> None:
    """Guards: a terminal over a slow line that a model of a million tensors waits for."""
    stream, clock = Terminal(), Clock()
    with Progress("loading", 10_000, 0, stream=stream, clock=clock) as progress:
        for _ in range(1000):
            clock.now += 0.001
            progress.add("m", 10)
    assert stream.getvalue().count("loading") <= 10


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_a_line_never_wraps(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a bar that scrolls, because a line that wraps is not erased."""
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = Terminal(), Clock()
    with Progress("loading", 10, 1, stream=stream, clock=clock) as progress:
        clock.now += 1
        progress.add("a.long.name." * 20, 5)
    assert max(len(line) for line in stream.getvalue().split("\r\x1b[K")) < columns


def test_more_than_was_announced_is_not_more_than_all() -> None:
    lines: list[str] = []
    clock = Clock()
    with Progress("loading", 0, 0, stream=io.StringIO(), write=lines.append, clock=clock) as progress:
        clock.now += 5
        progress.add("m", 5)
    assert lines == ["loading: 100 %, 5 B of 0 B, 0 of 0 layers, 1 B/s, 0:00 left"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (123_456, "123 kB"),
        (12_345_678, "12.3 MB"),
        (5_000_000_000, "5.0 GB"),
        (7_000_000_000_000_000, "7000 TB"),
    ],
)
def test_sizes_are_written_as_people_read_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
