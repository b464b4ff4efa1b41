"""A real server on a real socket, in a thread of the test process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import pytest

from gemmwire_service.app import Service, create_app
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.checkpoint import LayerWeights
from gemmwire_service.device import Job
from gemmwire_service.engine import Engine, State
from gemmwire_service.lane import Lane
from gemmwire_service.listener import bind, unix_listener, url
from gemmwire_service.safetensors_body import read_weights
from gemmwire_service.server import make_server
from gemmwire_service.settings import Settings
from gemmwire_service.shared_refit import SharedRefit

# Plans of the simulators stay out of the user's own, and of another run's.
_CACHE = Path(gettempdir()) / f"gemmwire-tests-{os.getpid()}"


@dataclass(frozen=True)
class Served:
    url: str
    port: int
    engine: Engine
    stop: Callable[[], None]
    lane: Lane
    shared: SharedRefit | None = None


def settings(**fields: object) -> Settings:
    """Settings for a test: the port is free, the device the CPU."""
    return Settings.model_validate({"port": 0, "device": "cpu", "cache_dir": str(_CACHE), **fields})


@contextmanager
def serving(
    options: Settings, *, wait: bool = True, prepare: Callable[[Service], None] | None = None
) -> Iterator[Served]:
    """Serve until the block ends; with `wait`, from the moment the layers are ready."""
    listener = bind(options.host, options.port)
    app = create_app(options)
    if prepare is not None:
        prepare(app)
    engine: Engine = app.state.engine
    server = make_server(app, options)
    stack = ExitStack()
    sockets = [listener, *([stack.enter_context(unix_listener(options.uds))] if options.uds else [])]
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True

    try:
        until(lambda: server.started, "the server did not start")
        if wait:
            until(lambda: engine.state is not State.LOADING, "the layers were not loaded")
            if engine.failure is not None:
                raise engine.failure
        yield Served(
            url(listener, options.host),
            listener.getsockname()[1],
            engine,
            stop,
            app.state.lane,
            app.state.shared_refit,
        )
    finally:
        stop()
        thread.join(timeout=30)
        listener.close()
        stack.close()


def until(condition: Callable[[], object], failure: str, seconds: float = 30.0) -> None:
    """Wait for a condition, and fail with a sentence where it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(failure)
        time.sleep(0.002)


def hold(engine: Engine, gate: threading.Event) -> None:
    """Keep the device busy, from now until the gate is set."""
    began = threading.Event()

    def wait() -> None:
        began.set()
        assert gate.wait(30), "the test did not release the device"

    engine.post(Job(wait))
    assert began.wait(30), "the device did not take the job"


def hold_reading(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Read new weights when the test lets it -> (some are to be read, they may be)."""
    reading, gate = threading.Event(), threading.Event()

    def slow(body: memoryview, spec: LayerSpec) -> LayerWeights:
        reading.set()
        assert gate.wait(30), "the test did not let the weights be read"
        return read_weights(body, spec)

    monkeypatch.setattr("gemmwire_service.weights.read_weights", slow)
    return reading, gate
