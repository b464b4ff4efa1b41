"""The uvicorn server that carries the app."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from .listener import BACKLOG
from .settings import Settings

# Longer than the pools of common clients and proxies keep a connection, so that they close it, not we.
KEEP_ALIVE_S = 75
GRACE_S = 10  # for requests under way when the server is told to stop; a half-sent one would hold it for ever


def make_server(app: FastAPI, settings: Settings) -> uvicorn.Server:
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning" if settings.log_level == "info" else settings.log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            proxy_headers=False,  # nothing here asks who the client is
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=BACKLOG,
        )
    )
    app.state.engine.in_flight = lambda: len(server.server_state.tasks)
    return server
