"""How long the tests of this folder look, and where: a moment in the whole suite, else as ./dev fuzz says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

VARIABLE = "GEMMWIRE_FUZZ_SECONDS"
FOLDER = "GEMMWIRE_FUZZ_FOLDER"  # for files of one target; thousands are written each second


def while_there_is_time(look: Callable[[], None]) -> None:
    """At least once, and again, with other choices each time, until the seconds of VARIABLE have passed."""
    end = time.monotonic() + float(os.environ.get(VARIABLE, "0"))
    look()
    while time.monotonic() < end:
        look()


def in_memory() -> TemporaryDirectory[str]:
    """A folder in memory, where there is such a place."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return TemporaryDirectory(prefix="gemmwire-fuzz-", dir=place)
