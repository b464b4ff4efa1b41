"""A signal to stop, in every phase of a server: it ends soon, and what was asked before is answered."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save

from http_calls import HEADER_LENGTH, raw
from process import COMMAND, environment
from tampered import tampered

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LAYER = ("--random-layer", "r=64x64")

# Each phase is said, and lasts long enough for a signal to come in the middle of it.
LOADING = """
import time
from gemmwire_service import loader
real = loader._random_weights
def slow(*arguments):
    reached("loading")
    time.sleep(1)
    return real(*arguments)
loader._random_weights = slow
"""
WARMING = """
import time
from gemmwire_service.backends.emulation import Emulation
real = Emulation.forward
def slow(self, *arguments):
    reached("warming")
    time.sleep(1)
    real(self, *arguments)
Emulation.forward = slow
"""
SERVING = """
import time
from gemmwire_service.device import Device
Device.compute_now = lambda *_, **__: None  # the event loop goes on meanwhile
from gemmwire_service.backends.emulation import Emulation
real = Emulation.forward
def slow(self, x, *arguments):
    if (x[:, 0] == 512).any():
        reached("serving")
        time.sleep(2)
    real(self, x, *arguments)
Emulation.forward = slow
"""
REFITTING = """
import time
from gemmwire_service.shadow import Shadow
real = Shadow.exchange
def slow(self):
    reached("refitting")
    time.sleep(2)
    real(self)
Shadow.exchange = slow
"""


def ask(port: int, first: float) -> int:
    """The status of an answer to one row, which begins with `first`."""
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[0, 0] = first
    return send(port, "POST", "/v2/models/r/infer", raw(x), {HEADER_LENGTH: "0"})


def send(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        link.request(method, path, body, headers)
        reply = link.getresponse()
        reply.read()
        return reply.status
    finally:
        link.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("seconds", [0.2, 0.4, 0.8])
def test_while_it_imports(number: signal.Signals, seconds: float) -> None:
    """Guards: a traceback for who stops what has hardly begun."""
    with subprocess.Popen(
        [*COMMAND, "--port", "0", *LAYER], stderr=subprocess.PIPE, text=True, env=environment()
    ) as running:
        time.sleep(seconds)
        running.send_signal(number)
        _, said = running.communicate(timeout=60)
    assert running.returncode in (0, 130, -number), said
    # The interpreter's own start is not ours: before it has come to any file of the service.
    assert "Traceback" not in said or "gemmwire_service" not in said


DROPPED = """
import os, signal
from gemmwire_service.interrupt import EARLY
class Gone:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
EARLY.listen()
Gone()
"""


def test_an_interrupt_that_python_drops() -> None:
    """Guards: a server that serves on after Ctrl-C, which came in a destructor."""
    with tampered(DROPPED, *LAYER) as server:
        assert server.process.wait(60) == 130, server.text
    assert "Exception ignored" in server.text


@pytest.mark.parametrize(
    ("phase", "code"), [("loading", LOADING), ("warming", WARMING)], ids=["loading", "warming"]
)
def test_while_it_gets_ready(phase: str, code: str) -> None:
    with tampered(code, *LAYER) as server:
        server.wait_for(phase)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert "Traceback" not in server.text


def test_while_a_batch_is_computed() -> None:
    """Guards: a restart that costs the requests that are at the device."""
    with tampered(SERVING, *LAYER) as server, ThreadPoolExecutor(4) as pool:
        port = server.port
        slow = pool.submit(ask, port, 512.0)
        server.wait_for("serving")
        behind = [pool.submit(ask, port, 1.0) for _ in range(3)]
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert [slow.result(), *(each.result() for each in behind)] == [200] * 4
        assert server.process.wait(30) == 0


def test_while_a_weight_is_replaced() -> None:
    """Guards: half a weight, or a client of a refit that never hears of it."""
    weights = save({"weight": torch.ones(64, 64)})
    with tampered(REFITTING, *LAYER) as server, ThreadPoolExecutor(1) as pool:
        path = "/v2/repository/models/r/weights"
        refit = pool.submit(send, server.port, "PUT", path, weights, {})
        server.wait_for("refitting")
        server.process.send_signal(signal.SIGTERM)
        assert refit.result() == 200
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_while_it_stops(number: signal.Signals) -> None:
    """Guards: a second signal that hangs the server, or ends it by a traceback."""
    with tampered(SERVING, *LAYER) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask_or_nothing, server.port)
        server.wait_for("serving")
        for _ in range(3):
            server.process.send_signal(number)
            time.sleep(0.1)
        assert slow.result() in (200, 503, None)
        assert server.process.wait(30) == 0
    assert "Traceback" not in server.text


def ask_or_nothing(port: int) -> int | None:
    """None where the connection ends without an answer."""
    try:
        return ask(port, 512.0)
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        return None


def test_what_is_killed_is_started_again_and_its_clients_go_on() -> None:
    """Guards: a port or a folder that a killed server leaves in the next one's way."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop = threading.Event()
    answered = [0, 0]

    def client(number: int) -> None:
        while not stop.is_set():
            try:
                answered[number] += ask(port, 1.0) == 200
            except (http.client.HTTPException, OSError):
                time.sleep(0.02)

    arguments = ["--port", str(port), "--device", "cpu", *LAYER]
    threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            before = list(answered)
            with subprocess.Popen(
                [sys.executable, *COMMAND[1:], *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            ) as running:
                end = time.monotonic() + 60
                while min(now - then for now, then in zip(answered, before, strict=True)) < 20:
                    assert running.poll() is None, running.stderr and running.stderr.read()
                    assert time.monotonic() < end, "its clients did not come back"
                    time.sleep(0.02)
                running.kill()
                running.communicate(timeout=30)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
