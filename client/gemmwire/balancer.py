"""Which of several hosts gets a request, without I/O: the one with the fewest bytes outstanding that works.

A host that fails is set aside, for twice as long each time, and then tried again by one request. Where all
are aside, the one whose time is up first is tried.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from . import forks

_FIRST_S = 0.2  # aside after one failure
_LONGEST_S = 10.0  # after many
_LONGEST_ASKED_S = 60.0  # what a host may ask for


@dataclass(frozen=True, eq=False)
class Lease:
    """One request at one host, from `pick` until `answered`, `failed` or `dropped`. `turn` counts picks."""

    host: int
    nbytes: int
    turn: int


@dataclass(slots=True)
class _Host:
    outstanding: int = 0  # bytes
    used: int = 0  # the turn of the last request
    failures: int = 0  # one after the other
    until: float = 0.0  # aside, by the clock
    outage: int = -1  # the turn at which the last failure came
    trial: Lease | None = None  # the request that finds out whether it works again

    def is_open(self, now: float) -> bool:
        return not self.failures or (self.trial is None and self.until <= now)


class Balancer:
    """Hosts 0..hosts-1; safe to use from threads. `clock` is in seconds, `jitter(a, b)` between a and b."""

    def __init__(
        self,
        hosts: int,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._hosts = [_Host() for _ in range(hosts)]
        self._clock = clock
        self._jitter = jitter
        self._turn = 0
        self._lock = threading.Lock()
        forks.reset_after_fork(self)

    def pick(self, nbytes: int, tried: Collection[int] = (), *, working: bool = False) -> Lease | None:
        """A host for a request of so many bytes that is none of `tried`; None where there is none.

        `working`: none that is aside either.
        """
        with self._lock:
            host = self._best(tried, working)
            if host is None:
                return None
            self._turn += 1
            lease = Lease(host, nbytes, self._turn)
            entry = self._hosts[host]
            entry.outstanding += nbytes
            entry.used = self._turn
            if entry.failures:
                entry.trial = lease
            return lease

    def answered(self, lease: Lease) -> None:
        """The host works."""
        with self._lock:
            entry = self._settle(lease)
            if lease.turn > entry.outage:
                entry.failures = 0

    def failed(self, lease: Lease, asked: float | None = None) -> None:
        """The host does not work; `asked`: seconds after which it wants to be asked again."""
        with self._lock:
            entry = self._settle(lease)
            if lease.turn <= entry.outage:
                return  # it had begun before the failure that is known, and tells of the same one
            entry.outage = self._turn
            entry.failures += 1
            seconds = min(_LONGEST_S, _FIRST_S * 2.0 ** min(entry.failures - 1, 64))
            seconds = max(seconds, min(asked or 0.0, _LONGEST_ASKED_S))
            entry.until = self._clock() + seconds * self._jitter(1.0, 1.5)

    def dropped(self, lease: Lease) -> None:
        """It was given up, which says nothing of the host."""
        with self._lock:
            self._settle(lease)

    def reset_after_fork(self) -> None:
        """The requests under way are the parent's."""
        self._lock = threading.Lock()
        for entry in self._hosts:
            entry.outstanding, entry.trial = 0, None

    def _best(self, tried: Collection[int], working: bool) -> int | None:
        now = self._clock()
        left = [host for host in range(len(self._hosts)) if host not in tried]
        opened = [host for host in left if self._hosts[host].is_open(now)]
        if opened:
            return min(opened, key=lambda host: (self._hosts[host].outstanding, self._hosts[host].used))
        if working or not left:
            return None
        return min(left, key=lambda host: (self._hosts[host].until, self._hosts[host].used))

    def _settle(self, lease: Lease) -> _Host:
        entry = self._hosts[lease.host]
        # Not below 0: it may have been begun in the process that this one was forked from.
        entry.outstanding = max(0, entry.outstanding - lease.nbytes)
        if entry.trial is lease:
            entry.trial = None
        return entry
