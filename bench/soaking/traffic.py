"""Requests in a closed loop, for the capacity, and in an open one at a rate."""

from __future__ import annotations

import asyncio
import bisect
import random
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from soaking.connection import Broken, Connection
from soaking.exact import Request, in_proportion
from soaking.malformed import KINDS, mistreat
from soaking.tally import Tally
from soaking.verify import wrong

CLIENTS = 8  # of the closed loop
KEPT = 32  # connections of the open one, used in turn
MOST_WAITING = 512
FRESH, MALFORMED = 0.05, 0.02


@dataclass
class Versions:
    """Of a layer: which weight a version is, and the one that every later request has to be answered with."""

    weights: dict[int, int] = field(default_factory=lambda: {1: 0})
    current: int = 1


class Traffic:
    def __init__(
        self, port: int, requests: list[Request], versions: dict[str, Versions], tally: Tally, seed: int = 0
    ) -> None:
        self.port, self.versions, self.tally = port, versions, tally
        self._random = random.Random(seed)
        self._requests, self._shares = zip(*in_proportion(requests), strict=True)
        self._kept: asyncio.Queue[Connection | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self) -> Request:
        place = bisect.bisect(self._shares, self._random.random())
        found: Request = self._requests[min(place, len(self._requests) - 1)]
        return found

    async def capacity(self, seconds: float) -> float:
        """Right answers a second to clients that ask again at once."""
        before, end = self.tally.counts["answered"], time.perf_counter() + seconds

        async def client() -> None:
            connection = None
            while time.perf_counter() < end:
                connection = await self.ask(connection, self.request(), time.perf_counter())
            if connection is not None:
                connection.close()

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return (self.tally.counts["answered"] - before) / seconds

    async def steady(self, rate: float, seconds: float) -> None:
        """`rate` requests a second, however long the answers take, at random moments."""
        for _ in range(KEPT):
            self._kept.put_nowait(None)
        at = time.perf_counter()
        end = at + seconds
        while at < end:
            at += self._random.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))  # at least once round the event loop
            self._start(at)
        await self._finish()

    def _start(self, at: float) -> None:
        if self._random.random() < MALFORMED:
            self.tally.counts["malformed"] += 1
            kind = self._random.choice(KINDS)
            self._run(mistreat(self.port, kind, lambda sentence: self.tally.broken("failed", sentence)))
        elif len(self._tasks) >= MOST_WAITING:
            self.tally.counts["late"] += 1
        else:
            fresh = self._random.random() < FRESH
            self._run(self._on_fresh(at) if fresh else self._on_kept(at))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.tally.broken("failed", f"the client itself: {error!r}")

    async def _on_fresh(self, at: float) -> None:
        self.tally.counts["fresh"] += 1
        connection = await self.ask(None, self.request(), at)
        if connection is not None:
            connection.close()

    async def _on_kept(self, at: float) -> None:
        connection = await self._kept.get()
        try:
            connection = await self.ask(connection, self.request(), at)
        finally:
            self._kept.put_nowait(connection)

    async def ask(self, connection: Connection | None, request: Request, at: float) -> Connection | None:
        """Ask, verify, count -> the connection as long as it is one. `at`: when it should have been sent."""
        versions = self.versions[request.layer]
        least = versions.current
        try:
            connection = connection or await Connection.open(self.port)
            answer = await connection.ask(request.sent)
        except (Broken, OSError) as error:
            if connection is not None:
                connection.close()
            self.tally.broken("failed", f"{request.layer}, {request.form}: {error}")
            return None
        seconds = time.perf_counter() - at
        if answer.status == 503:
            self.tally.counts["refused"] += 1
        elif answer.status != 200:
            self.tally.broken("failed", f"{request.form}: {answer.status} {answer.body[:200]!r}")
        elif found := wrong(request, answer, versions.weights, least):
            self.tally.broken("wrong", found)
        else:
            self.tally.right(request.form, seconds)
        return connection

    async def _finish(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(asyncio.QueueEmpty):
            while True:
                if (connection := self._kept.get_nowait()) is not None:
                    connection.close()
