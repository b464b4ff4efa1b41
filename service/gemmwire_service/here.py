"""Batches that the event loop sends to a CUDA device itself, without a hop to the device thread and back.

Sending a batch takes some microseconds and receiving it as many, if it is there: so the event loop sends what
is quick, goes on reading requests, and looks at each of its turns whether something has arrived. Whatever is
not quick goes to the device thread, after all that is under way here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .backlog import Backlog, Item
from .device import Device
from .done import Done


class Here:
    """For the event loop. `count` is the number of requests that are here, waiting or under way.

    `finish` gives answers out; `put` hands requests to the device thread. Either may call `take` again.
    """

    def __init__(
        self, device: Device, finish: Callable[[Done], None], put: Callable[[list[Item]], None]
    ) -> None:
        self.count = 0
        self._device = device
        self._finish = finish
        self._put = put
        self._backlog = Backlog(device.ladder.largest)
        self._polling = False

    def take(self, new: list[Item], loop: asyncio.AbstractEventLoop) -> None:
        """See to requests before which nothing waits at the device thread."""
        self.count += len(new)
        for item in new:
            self._backlog.add(item)
        self._start()
        self._poll_soon(loop)

    def drain(self) -> list[Item]:
        """Wait until nothing is under way, and give up what has not been sent: it is the caller's."""
        while self._receive(wait=True):
            pass
        left: list[Item] = []
        while self._backlog:
            batch, dropped = self._backlog.take()
            left += batch + dropped
        self.count -= len(left)
        return left

    def _start(self) -> None:
        while self._backlog and not self._device.full:
            batch, dropped = self._backlog.take()
            if dropped:
                self._ended(Done(dropped, [None] * len(dropped)))
            if batch and not self._device.quick(batch):
                self.count -= len(batch)
                return self._put(batch + self.drain())
            done = self._device.start_now(batch) if batch else None
            if done is not None:
                self._ended(done)
        return None

    def _receive(self, wait: bool) -> bool:
        done = self._device.receive_now(wait)
        if done is None:
            return False
        self._ended(done)
        return True

    def _ended(self, done: Done) -> None:
        self.count -= len(done.items)
        self._finish(done)

    def _poll_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.count and not self._polling:
            self._polling = True
            loop.call_soon(self._poll, loop)

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        """Other requests are read between two calls of this, and answers written."""
        self._polling = False
        while self._receive(wait=False):
            self._start()
        self._start()
        self._poll_soon(loop)
