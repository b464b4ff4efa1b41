"""Work that the event loop has the device do, after the requests that came before, and awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from .device import Job
from .engine import Engine

T = TypeVar("T")


async def on_device(engine: Engine, work: Callable[[], T]) -> T:
    """What `work` returns or raises, run as a job of the device. Errors: NotReady, Draining."""
    engine.refuse_unless_ready()  # a thread that has ended runs no job
    return await _post(engine, work)


def _post(engine: Engine, work: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    # Popped, because the device keeps its last job until the next, and would keep with it what that holds.
    once = [(work, answer)]

    def run() -> None:
        job, future = once.pop()
        try:
            result = job()
        except Exception as error:
            loop.call_soon_threadsafe(_fail, future, error)
            raise  # the device logs it, and looks whether it is lost
        else:
            loop.call_soon_threadsafe(_succeed, future, result)
        finally:
            del job, future  # an error holds this frame, and would be held by it

    engine.post(Job(run))
    return answer


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
