"""The end of a server: what is under way is answered, nothing new is taken, and it comes in time."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from gemmwire_service import server
from links import GOOD, answers, held, linked, statuses
from serving import hold, serving, settings, until

PATHS = pytest.mark.parametrize("fast", [True, False], ids=["fast-path", "asgi"])


@PATHS
def test_what_is_under_way_is_answered_and_nothing_new_is_taken(checkpoint: Path, fast: bool) -> None:
    """Guards: a restart that costs requests: those at the device, those in the queue, those half sent."""
    with (
        serving(settings(model=(f"m={checkpoint}",), fast_path=fast)) as served,
        linked(served) as waiting,
        linked(served) as half,
        linked(served) as idle,
    ):
        idle.sendall(GOOD)
        assert statuses(answers(idle, 1)) == [200]
        with held(served):
            waiting.sendall(GOOD)
            half.sendall(GOOD[:-7])
            until(lambda: served.engine.waiting == 1, "nothing waits")
            until(lambda: served.engine.held.receiving, "nothing is coming")
            served.stop()
            assert idle.recv(1) == b""  # closed: it has nothing under way
            with pytest.raises(OSError), linked(served) as late:  # noqa: PT012, PT011
                late.sendall(GOOD)
                if not late.recv(1):
                    raise ConnectionResetError
        answer = answers(waiting, 1)[0]
        assert statuses([answer]) == [200]
        assert b"connection: close" in answer.lower()
        half.sendall(GOOD[-7:])
        assert statuses(answers(half, 1)) == [200]


@PATHS
def test_a_client_that_never_ends_its_request_does_not_hold_it_up(
    checkpoint: Path, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    began = time.monotonic()
    with (
        serving(settings(model=(f"m={checkpoint}",), fast_path=fast)) as served,
        linked(served) as half,
    ):
        half.sendall(GOOD[:-7])
        until(lambda: served.engine.held.receiving, "nothing is coming")
        began = time.monotonic()
        served.stop()
        if fast:
            answer = answers(half, 1)[0]
            assert statuses([answer]) == [503]
            assert b'"code": "draining"' in answer
        with suppress(ConnectionError):
            while half.recv(4096):
                pass
    assert time.monotonic() - began < 20


def test_a_device_that_takes_longer_than_the_grace_is_waited_for_and_no_more(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: memory of a device that is let go while it computes; a server that never ends."""
    monkeypatch.setattr(server, "GRACE_S", 0.2)
    gate = threading.Event()
    with serving(settings(model=(f"m={checkpoint}",))) as served, linked(served) as link:
        hold(served.engine, gate)
        link.sendall(GOOD)
        until(lambda: served.engine.waiting == 1, "nothing waits")
        served.stop()
        until(lambda: served.engine.state.value == "draining", "it waits for the answer for ever")
        gate.set()
        with suppress(ConnectionError, socket.timeout):
            link.recv(65536)
    assert served.engine.waiting == 0
