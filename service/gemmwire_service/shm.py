"""Memory that clients of this host have registered, by name: what infer reads x from and writes y to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NoReturn, Protocol

from gemmwire.wire import Buffer, Shared, WireError

from .body import aligned

MOST = 256  # regions; each is an open file, or a mapping of a device's memory
SWEEP_S = 5.0


class Memory(Protocol):
    """What a region is made of. Each copy lies within `nbytes`; its owner may take it away at any time.

    Errors of `read` and `write`: WireError `region_gone`, never a signal or a fault of the device.
    """

    kind: ClassVar[str]

    @property
    def nbytes(self) -> int: ...

    def read(self, target: memoryview, offset: int) -> None: ...

    def lend(self, offset: int, nbytes: int) -> tuple[Buffer, Callable[[], None]] | None:
        """The bytes in place, where that is better than a copy of them, and what refuses them once they have
        been used, if they were not all there: WireError `region_gone`."""
        ...

    def write(self, data: Buffer, offset: int) -> None: ...

    def facts(self) -> dict[str, Any]:
        """What the status says of it, beside its size."""
        ...

    def abandoned(self) -> bool:
        """Whether its owner cannot use it any more."""
        ...

    def close(self) -> None: ...


class Opener(Protocol):
    """Makes one kind of memory of what a client sends to register it."""

    kind: ClassVar[str]

    def open(self, form: Mapping[str, Any]) -> Memory:
        """Errors: WireError `region_refused`, `region_range`."""
        ...


class Region:
    """A registered piece of memory. Once `close` has returned, nothing of it is read or written any more."""

    def __init__(self, name: str, memory: Memory) -> None:
        self.name = name
        self.memory = memory
        self._copying = threading.Lock()
        self._closed = False

    def read(self, place: Shared) -> memoryview:
        """The bytes at a place that was checked, in memory of their own: what its owner writes there later
        is not seen. Errors: WireError `region_gone`."""
        target = aligned(place.nbytes, 0)
        with self._copying:
            self._refuse_closed()
            self.memory.read(target, place.offset)
        return target

    def lend(self, place: Shared) -> tuple[Buffer, Callable[[], None] | None]:
        """The bytes at a place that was checked, in place where they are many: their owner must leave them
        alone for as long as they are used. What is called after that refuses them if they went meanwhile.

        Errors, of both: WireError `region_gone`.
        """
        with self._copying:
            self._refuse_closed()
            lent = self.memory.lend(place.offset, place.nbytes)
        if lent is None:
            return self.read(place), None
        data, refuse_shrunk = lent
        return data, partial(self._take_back, refuse_shrunk)

    def _take_back(self, refuse_shrunk: Callable[[], None]) -> None:
        with self._copying:
            self._refuse_closed()
            refuse_shrunk()

    def write(self, data: Buffer, offset: int) -> None:
        """Errors: WireError `region_gone`."""
        with self._copying:
            self._refuse_closed()
            self.memory.write(data, offset)

    def close(self) -> None:
        with self._copying:
            if not self._closed:
                self._closed = True
                self.memory.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise WireError(
                "region_gone",
                f"Region {self.name[:80]!r} was unregistered while the request was under way; register it "
                "again",
                got=self.name[:80],
            )


class Regions:
    """The regions of a server. Changed by the event loop alone; other threads may look one up."""

    def __init__(self, offered: tuple[str, ...] = ()) -> None:
        self.offered = offered  # kinds of memory
        self.generation = 0  # another one, and a region that was found may be gone
        self._regions: dict[str, Region] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._regions)

    def refuse_new(self, name: str) -> None:
        """Errors: WireError `region_exists`, `region_limit`."""
        self.sweep()
        if name in self._regions:
            raise WireError(
                "region_exists",
                f"There is a region {name[:80]!r} already; unregister it first, or take another name",
                status=409,
                got=name[:80],
            )
        if len(self._regions) >= MOST:
            raise WireError(
                "region_limit",
                f"{MOST} regions are registered, which is the limit; unregister one first",
                status=503,
                expected=f"< {MOST}",
                got=len(self._regions),
            )

    def add(self, name: str, memory: Memory) -> None:
        """After `refuse_new`, in the same turn of the event loop."""
        self._regions[name] = Region(name, memory)
        self._sweep_later()

    def remove(self, kind: str, name: str | None = None) -> None:
        """One, or all of a kind; a name that is not there is none that has to be removed."""
        for region in self._of(kind, name):
            del self._regions[region.name]
            region.close()
        self.generation += 1

    def registered(self, kind: str, name: str | None = None) -> list[Region]:
        """All of a kind, or one. Errors: WireError `region_unknown`."""
        self.sweep()
        found = self._of(kind, name)
        if name is not None and not found:
            raise _unknown(name, "The request")
        return found

    def find(self, place: Shared, where: str) -> Region:
        """The region that holds a place. Errors: WireError `region_unknown`, `region_range`, and
        `shared_memory_unsupported` of a server that offers none."""
        region = self._regions.get(place.region)
        if region is None:
            raise _unknown(place.region, where) if self.offered else unsupported(where)
        nbytes = region.memory.nbytes
        if place.offset + place.nbytes > nbytes:
            raise WireError(
                "region_range",
                f"{where} is at {place.offset} to {place.offset + place.nbytes} of region "
                f"{place.region[:80]!r}, which has {nbytes} bytes; register a larger one",
                expected=f"<= {nbytes}",
                got=place.offset + place.nbytes,
            )
        return region

    def sweep(self) -> None:
        """Let go of what nobody can use any more."""
        for region in [each for each in self._regions.values() if each.memory.abandoned()]:
            self.remove(region.memory.kind, region.name)

    def close(self) -> None:
        for kind in self.offered:
            self.remove(kind)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _of(self, kind: str, name: str | None) -> list[Region]:
        return [
            each
            for each in self._regions.values()
            if each.memory.kind == kind and (name is None or each.name == name)
        ]

    def _sweep_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep_again)

    def _sweep_again(self) -> None:
        self._timer = None
        self.sweep()
        if self._regions:
            self._sweep_later()


def unsupported(where: str) -> WireError:
    return WireError(
        "shared_memory_unsupported",
        f"{where} names a shared-memory region, which this server does not offer; send the tensor in the "
        "body, or start the server with --shm-prefix (on a GPU, --cuda-shm)",
    )


def refuse_region(message: str, expected: object = None, got: object = None) -> NoReturn:
    raise WireError("region_refused", message[:1].upper() + message[1:], expected=expected, got=got)


def _unknown(name: str, where: str) -> WireError:
    return WireError(
        "region_unknown",
        f"{where} names region {name[:80]!r}, which is not registered; register it first",
        status=404,
        got=name[:80],
    )
