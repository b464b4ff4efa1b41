"""What the log says of requests: infer requests that took long or failed, and, if asked, all there are."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .infer import request_id
from .logs import with_facts
from .settings import Settings
from .traffic import Finished, Traffic

log = logging.getLogger("gemmwire.requests")

_MOST_FAILURES = 20  # lines a second: under overload thousands fail, and writing of each would be more load
_NEVER = 1 << 62


def log_requests(traffic: Traffic, settings: Settings) -> None:
    """Infer requests that fail (5xx) or are slow from now on; with --access-log, all of them."""
    slow_ns = settings.slow_request_ms * 1_000_000 or _NEVER
    traffic.watch(RequestLog(slow_ns, settings.access_log), 0 if settings.access_log else slow_ns)


class RequestLog:
    def __init__(self, slow_ns: int, everything: bool) -> None:
        self._slow_ns = slow_ns
        self._everything = everything
        self._second = 0
        self._failures = 0  # in that second

    def __call__(self, finished: Finished) -> None:
        failed = finished.status >= 500
        if not failed and finished.ns < self._slow_ns:
            if self._everything:
                _write(logging.INFO, finished)
        elif self._everything or not failed or self._has_room():
            _write(logging.WARNING, finished)

    def _has_room(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            unsaid = self._failures - _MOST_FAILURES
            self._second, self._failures = second, 0
            if unsaid > 0:
                log.warning(
                    "%d more requests failed in one second", unsaid, extra=with_facts({"unsaid": unsaid})
                )
        self._failures += 1
        return self._failures <= _MOST_FAILURES


def _write(level: int, finished: Finished) -> None:
    facts = facts_of(finished)
    told = " ".join(f"{name}={value}" for name, value in facts.items() if name not in ("layer", "status"))
    log.log(level, "infer %s %d %s", finished.layer or "-", finished.status, told, extra=with_facts(facts))


def facts_of(finished: Finished) -> dict[str, object]:
    """`request_id` is the caller's, "-" for none; times in microseconds."""
    facts: dict[str, object] = {
        "request_id": request_id(finished.headers) or "-",
        "layer": finished.layer,
        "status": finished.status,
    }
    if finished.reason:
        facts["reason"] = finished.reason
    if finished.item is not None:
        facts["rows"] = finished.item.rows
    facts |= {f"{name}_us": (end - start) // 1000 for name, start, end in finished.stages()}
    return facts | {"total_us": finished.ns // 1000}


class LoggedRoutes:
    """The app, with a line for each request that is no infer request: those are told by `RequestLog`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "POST" and scope["path"].endswith("/infer")):
            return await self._app(scope, receive, send)
        began = time.monotonic_ns()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            facts = {
                "request_id": request_id(dict(scope["headers"])) or "-",
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "total_us": (time.monotonic_ns() - began) // 1000,
            }
            shown = f"{facts['method']} {facts['path']!r} {status}"
            told = f"request_id={facts['request_id']} total_us={facts['total_us']}"
            log.info("%s %s", shown, told, extra=with_facts(facts))
