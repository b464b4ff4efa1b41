"""How long the tests of this folder look: a moment in the whole suite, as long as ./dev fuzz says there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

VARIABLE = "GEMMWIRE_FUZZ_SECONDS"


def while_there_is_time(look: Callable[[], None]) -> None:
    """At least once, and again, with other choices each time, until the seconds of VARIABLE have passed."""
    end = time.monotonic() + float(os.environ.get(VARIABLE, "0"))
    look()
    while time.monotonic() < end:
        look()
