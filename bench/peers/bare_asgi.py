"""A bare ASGI app on uvicorn: what somebody writes who wants nothing but speed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import uvicorn


def serve(answer: Callable[[bytes], bytes]) -> None:
    """At the port that the command line names."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        reply = answer(b"".join(parts))
        headers = [(b"content-length", str(len(reply)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False, lifespan="off")
