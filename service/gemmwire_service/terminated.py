"""SIGTERM as Ctrl-C: commands that write clean up behind them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that nothing half written is left."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
