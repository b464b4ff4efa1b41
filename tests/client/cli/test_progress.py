"""The bar of a long run."""

from __future__ import annotations

import io

from gemmwire.cli.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bar_on_a_terminal_and_nothing_of_it_at_the_end() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("m.l", 200, "rows", stream=stream, clock=clock) as progress:
        clock.now += 2
        progress.reach(50)
        drawn = stream.getvalue()
        clock.now += 0.01
        progress.reach(51)
        assert stream.getvalue() == drawn, "it is drawn ten times a second"
        clock.now += 2
        progress.reach(400)
    assert drawn == "\r\x1b[Km.l [######------------------] 50 of 200 rows, 0:06 left"
    assert stream.getvalue().endswith("\r\x1b[K")


def test_what_is_quick_needs_no_bar() -> None:
    """Guards: a flicker on every short command."""
    stream, clock = Terminal(), Clock()
    with Progress("m.l", 2, "rows", stream=stream, clock=clock) as progress:
        clock.now += 0.3
        progress.reach(1)
    assert stream.getvalue() == ""


def test_nothing_where_there_is_no_terminal() -> None:
    """Guards: control characters in a log."""
    stream, clock = io.StringIO(), Clock()
    with Progress("m.l", 0, "rows", stream=stream, clock=clock) as progress:
        clock.now += 5
        progress.reach(1)
    assert stream.getvalue() == ""
