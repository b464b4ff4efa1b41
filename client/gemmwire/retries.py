"""Whether a call that failed is tried again, and when. Nothing here waits.

A forward and a question change nothing on the server, so that they can be repeated; a refit is repeated only
where it names the version that it replaces, which a second one would not find any more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .errors import ConnectionFailed, GatewayFailed, GemmwireError, InvalidArgument, Overloaded


@dataclass(frozen=True)
class Retries:
    """How often a call that failed is made again, and how long it waits before that.

    `attempts` are those after the first; 0 is none. The wait before the first of them is `delay` seconds,
    doubled each time up to `longest`, or what the server asks for (Retry-After) where that is more; then, so
    that clients which failed together do not come back together, up to half as much again by chance.

    What is tried again: a connection that failed or broke, 429 and 503, and a proxy's word that it lost the
    server. Never beyond the call's timeout.
    """

    attempts: int = 2
    delay: float = 0.1
    longest: float = 5.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 0:
            raise InvalidArgument(f"attempts is {self.attempts!r}; it must be a whole number, 0 for none")
        for name in ("delay", "longest"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
                raise InvalidArgument(f"{name} is {value!r}; it must be seconds, 0 or more")

    def wait(self, failures: int, error: GemmwireError) -> float | None:
        """Seconds to wait after so many failures, the last of which was `error`; None: it is the answer."""
        if failures > self.attempts or not _passing(error):
            return None
        seconds = min(self.longest, self.delay * 2.0 ** min(failures - 1, 64))
        asked = error.retry_after if isinstance(error, Overloaded) else None
        return max(seconds, asked or 0.0) * random.uniform(1.0, 1.5)


def retries_of(value: Retries | int) -> Retries:
    """What a client is given as `retries`. Errors: `InvalidArgument`."""
    if isinstance(value, Retries):
        return value
    if type(value) is int and value >= 0:
        return Retries(attempts=value)
    raise InvalidArgument(
        f"retries is {value!r:.80}; it must be a whole number, 0 for none, or gemmwire.Retries(...)"
    )


def _passing(error: GemmwireError) -> bool:
    return isinstance(error, (Overloaded, GatewayFailed)) or (
        isinstance(error, ConnectionFailed) and error.passing
    )
