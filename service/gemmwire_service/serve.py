"""Serve: from settings to a running server, and what its end means for the exit status."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .errors import ServiceError
from .listener import bind, is_loopback, unix_listener, url
from .settings import Settings

if TYPE_CHECKING:
    import uvicorn


log = logging.getLogger("gemmwire")


def serve(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM. Errors: SettingsError, before anything is loaded."""
    began = time.monotonic()
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with ExitStack() as stack:
        listeners = [bind(settings.host, settings.port)]
        if settings.uds:
            listeners.append(stack.enter_context(unix_listener(settings.uds)))
        return _run(settings, listeners, began)


def _run(settings: Settings, listeners: list[socket.socket], began: float) -> int:
    listener = listeners[0]
    where = url(listener, settings.host)
    if not is_loopback(listener):
        log.warning(
            "%s:%d is open to everybody who can reach this machine: there is no access control yet; "
            "put a proxy with one in front, or bind 127.0.0.1",
            *listener.getsockname()[:2],
        )
    # Imported here so that a wrong flag or a taken port is answered at once: torch takes a second.
    from .announce import announce
    from .app import create_app
    from .engine import Engine
    from .server import make_server

    def on_loaded(engine: Engine) -> None:
        if engine.failure is not None:
            server.should_exit = True
        elif not server.should_exit:
            announce(engine, where, time.monotonic() - began)

    app = create_app(settings, on_loaded)
    server = make_server(app, settings)
    _stop_on_signals(server)
    server.run(sockets=listeners)
    return _status(app.state.engine.failure)


def _stop_on_signals(server: uvicorn.Server) -> None:
    """uvicorn raises the signal again once it has stopped; here it ends in nothing, and so in status 0."""

    def stop(number: int, frame: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _status(failure: Exception | None) -> int:
    if failure is None:
        return 0
    if isinstance(failure, ServiceError):
        print(f"gemmwire-serve: {failure}", file=sys.stderr)
    else:
        log.error("loading failed", exc_info=failure)
    return 1
