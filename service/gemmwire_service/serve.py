"""Serve: from settings to a running server, and what its end means for the exit status."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .errors import ServiceError, SettingsError
from .interrupt import EARLY
from .listener import allow_files, bind, is_loopback, unix_listener, url
from .logs import configure, with_facts
from .settings import Settings
from .tls import Certificate, certificate_of

if TYPE_CHECKING:
    import uvicorn

    from .access import Access


log = logging.getLogger("gemmwire")

_OTHER_FILES = 256  # beside connections: weights, caches, libraries, clients beyond the bound


def serve(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM. Errors: SettingsError, before anything is loaded."""
    began = time.monotonic()
    configure(settings)
    certificate = certificate_of(settings.tls_cert, settings.tls_key)
    allow_files(settings.max_connections + _OTHER_FILES)
    with ExitStack() as stack:
        listeners = [bind(settings.host, settings.port)]
        if not is_loopback(listeners[0]):
            _refuse_open(settings)
        if settings.uds:
            listeners.append(stack.enter_context(unix_listener(settings.uds)))
        return _run(settings, listeners, certificate, began)


def _refuse_open(settings: Settings) -> None:
    """Errors: SettingsError where others than this machine could come, without keys and nobody wanting it."""
    where = f"{settings.host}:{settings.port}"
    if settings.key_file:
        if not settings.tls_cert:
            log.warning("keys and tensors go to %s unencrypted: set --tls-cert, or put TLS in front", where)
    elif settings.insecure:
        log.warning("%s is open to everybody who can reach this machine, as --insecure allows", where)
    else:
        raise SettingsError(
            f"{where} can be reached by other machines, and there are no keys to let them in by: set "
            "--key-file (gemmwire-serve key makes a key), or bind 127.0.0.1, or say --insecure where "
            "something else, as a firewall or a proxy, decides who gets here",
            expected="--key-file, a loopback address or --insecure",
            got=settings.host,
        )


def _run(
    settings: Settings, listeners: list[socket.socket], certificate: Certificate | None, began: float
) -> int:
    where = url(listeners[0], settings.host, "https" if certificate else "http")
    # Imported here so that a wrong flag or a taken port is answered at once: torch takes a second.
    from .announce import announce
    from .app import create_app
    from .engine import Engine
    from .server import make_server

    def on_loaded(engine: Engine) -> None:
        if engine.failure is not None:
            server.should_exit = True
        elif not server.should_exit:
            _rest_from_collection()
            seconds = time.monotonic() - began
            if settings.log_format == "json":
                facts = {"url": where, "layers": len(engine.layers), "seconds": round(seconds, 3)}
                log.info("ready on %s", where, extra=with_facts(facts))
            else:
                announce(engine, where, seconds, app.access.by_key)

    app = create_app(settings, on_loaded)
    server = make_server(app, settings)
    _stop_on_signals(server)
    EARLY.raise_dropped()
    if app.access.by_key or certificate:
        _reload_on_hangup(server, app.access, certificate)
    server.run(sockets=listeners)
    return _status(app.state.engine.failure)


def _rest_from_collection() -> None:
    """What is there by now stays: going through all of torch's objects would hold an answer up for 40 ms."""
    gc.collect()
    gc.freeze()


def _reload_on_hangup(server: uvicorn.Server, access: Access, certificate: Certificate | None) -> None:
    def reload(number: int, frame: object) -> None:
        access.reload()
        if certificate is not None and server.config.ssl is not None:
            certificate.reload(server.config.ssl)

    signal.signal(signal.SIGHUP, reload)


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
