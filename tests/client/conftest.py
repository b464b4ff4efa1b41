"""Fixtures of the client's tests."""

from __future__ import annotations

from collections.abc import Iterator
from ssl import SSLContext

import pytest

from either_transport import Loop, Make, Sending, Tasks, threads


@pytest.fixture(params=["threads", "tasks"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes a transport, of each kind in turn."""
    if request.param == "threads":
        yield threads
        return
    loop = Loop()

    def tasks(url: str, max_connections: int = 1, tls: SSLContext | None = None) -> Sending:
        return Tasks(loop, url, max_connections, tls)

    yield tasks
    loop.stop()
