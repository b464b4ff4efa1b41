"""The uvicorn server that carries the app."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import cast

import uvicorn

from .app import Service
from .connection import Connection
from .lane import Lane
from .listener import BACKLOG
from .patience import Patience
from .request_log import LoggedRoutes
from .settings import Settings
from .uvicorn_protocol import is_for_the_log

log = logging.getLogger("gemmwire.server")

LAST_S = 0.2  # for the last answers to leave
GRACE_S = 10  # for requests under way when the server is told to stop; a half-sent one would hold it for ever


class Server(uvicorn.Server):
    """One that leaves no connection behind when the grace is over.

    TLS is for the port: a Unix socket is reached from this machine alone, where clients speak none.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        local = [each for each in given if each.family == getattr(socket, "AF_UNIX", None)]
        await super().startup([each for each in given if each not in local])
        self.servers += [await self._listen(each) for each in local]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # By a second Ctrl-C: nobody ends the lifespan, which uvicorn would log as a fault.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            log.warning("stopped at once; requests that were under way have no answer")
        left = cast(list[Connection], list(self.server_state.connections))
        for connection in left:
            connection.end()
        if left:
            await asyncio.sleep(LAST_S)
        for connection in cast(list[Connection], list(self.server_state.connections)):
            connection.abort()
        await asyncio.sleep(0)  # in which they are lost

    async def _listen(self, unix: socket.socket) -> asyncio.Server:
        protocol = partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return await asyncio.get_running_loop().create_unix_server(protocol, sock=unix, backlog=BACKLOG)


def make_server(app: Service, settings: Settings) -> uvicorn.Server:
    """Infer is taken from the socket, unless a setting or a middleware, which must see it, forbids."""
    lane = Lane(
        app.infer,
        app.access,
        Patience(settings.keep_alive_s, settings.stall_s, settings.min_bytes_per_s),
        most=settings.max_connections,
        takes_infer=settings.fast_path and not app.user_middleware,
    )
    server = Server(
        uvicorn.Config(
            LoggedRoutes(app) if settings.access_log else app,
            http=cast(type[asyncio.Protocol], partial(Connection, lane)),
            ws="none",
            log_config=None,
            log_level="warning" if settings.log_level == "info" else settings.log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
            proxy_headers=False,  # nothing here asks who the client is
            timeout_keep_alive=settings.keep_alive_s,
            backlog=BACKLOG,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
        )
    )
    logging.getLogger("uvicorn.error").addFilter(is_for_the_log)
    app.state.lane = lane
    if lane.takes_infer:
        app.state.engine.answering = lane
    app.state.engine.alone = partial(_alone, server.server_state.tasks, lane)
    return server


def _alone(tasks: set[asyncio.Task[None]], lane: Lane) -> bool:
    """Whether the request at the engine is the only one, and no other client's is to be expected."""
    if not lane.takes_infer:
        return len(tasks) == 1
    return len(tasks) + lane.begun == 1 and lane.alone
