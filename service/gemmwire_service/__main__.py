"""gemmwire-serve: the service's command line."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Sequence

from .errors import ServiceError, SettingsError
from .settings import Settings, load

_KEEP_ALIVE_S = 75
_BACKLOG = 2048


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 after a graceful stop, 1 where loading failed, 2 where the settings are wrong."""
    try:
        return serve(load(sys.argv[1:] if arguments is None else arguments))
    except ServiceError as error:
        print(f"gemmwire-serve: {error}", file=sys.stderr)
        return 2


def serve(settings: Settings) -> int:
    """Run until SIGINT or SIGTERM. Errors: SettingsError, before anything is loaded."""
    began = time.monotonic()
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    listener = _bind(settings.host, settings.port)
    # Imported here so that a wrong flag is answered at once: torch takes a second.
    import uvicorn

    from .announce import announce
    from .app import create_app
    from .engine import Engine

    def on_loaded(engine: Engine) -> None:
        if engine.failure is not None:
            server.should_exit = True
        else:
            announce(engine, _url(listener, settings.host), time.monotonic() - began)

    app = create_app(settings, on_loaded)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning" if settings.log_level == "info" else settings.log_level,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
    )
    server.run(sockets=[listener])
    return _status(app.state.engine.failure)


def _status(failure: Exception | None) -> int:
    if failure is None:
        return 0
    if isinstance(failure, ServiceError):
        print(f"gemmwire-serve: {failure}", file=sys.stderr)
    else:
        logging.getLogger("gemmwire").error("loading failed", exc_info=failure)
    return 1


def _bind(host: str, port: int) -> socket.socket:
    """Bind before loading, so that a taken port is told in a second and port 0 has a number to print."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], info[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(info[4])
    except OSError as error:
        raise SettingsError(
            f"Cannot bind {host}:{port} ({error.strerror or error}); choose another with --host and --port",
            got=f"{host}:{port}",
        ) from None
    return listener


def _url(listener: socket.socket, host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}"


if __name__ == "__main__":
    sys.exit(main())
