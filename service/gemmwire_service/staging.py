"""Pinned host memory between requests and the device, and three streams: copy in, compute, copy out.

While one batch computes, the next is copied in and the last copied out. Nothing here waits but `receive`, for
the event that ends a batch, and once its buffers are there nothing allocates.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .mail import Mailbox
from .program import BF16, Program
from .streams import Streams

log = logging.getLogger("gemmwire.staging")

DEPTH = 3  # batches under way: one on each stream
SMALL = 1 << 19  # elements; a batch below it takes a small slot
SPARE_SMALL = 32  # small slots whose answers may be lent
SPARE_LARGE = 2
_LEND_FROM = 32 << 10  # bytes; a smaller answer is copied sooner than it is lent

Fill = Callable[["Slot"], None]


@dataclass(eq=False)
class Slot:
    """The way in, and the way across, of one batch; BF16, flat."""

    host: Tensor  # pinned
    x: Tensor  # on the device
    y: Tensor  # on the device
    copied: int  # events
    computed: int
    done: int
    raw: memoryview = field(init=False)  # of `host`, as bytes

    def __post_init__(self) -> None:
        self.raw = self.host.view(torch.uint8).numpy().data
        self.host_at, self.x_at, self.y_at = self.host.data_ptr(), self.x.data_ptr(), self.y.data_ptr()

    def rows(self, m: int, k_pad: int) -> Tensor:
        return self.host[: m * k_pad].view(m, k_pad)


@dataclass(eq=False)
class Outlet:
    """Pinned memory that y is copied into; lent to whoever sends the answer."""

    host: Tensor
    raw: np.ndarray[Any, np.dtype[np.uint8]] = field(init=False)
    lease: object = None

    def __post_init__(self) -> None:
        self.raw = self.host.view(torch.uint8).numpy()
        self.host_at = self.host.data_ptr()


@dataclass(eq=False)
class Flight:
    """A batch under way."""

    program: Program
    rows: int
    slot: Slot
    outlet: Outlet
    ring: Ring

    @property
    def nbytes(self) -> int:
        """Of y."""
        return BF16 * self.rows * self.program.n


class Ring:
    """Slots of one capacity, in elements: DEPTH for batches under way, and more outlets than that.

    An outlet that is lent comes back when its answers have been sent, which a slow client decides. So one is
    lent only while DEPTH others remain; else the answer is copied.
    """

    def __init__(self, streams: Streams, capacity: int, spare: int) -> None:
        self.capacity = capacity
        self._slots = deque(_slot(streams, capacity) for _ in range(DEPTH))
        self._outlets = deque(Outlet(streams.pinned(capacity)) for _ in range(DEPTH + spare))
        self._taken = 0

    def take(self) -> tuple[Slot, Outlet]:
        self._taken += 1
        return self._slots.popleft(), self._outlets.popleft()

    @property
    def full(self) -> bool:
        return not self._slots

    def give_back(self, slot: Slot, outlet: Outlet) -> None:
        self._taken -= 1
        self._slots.append(slot)
        self._outlets.append(outlet)

    def lend(self, slot: Slot, outlet: Outlet, nbytes: int) -> memoryview:
        """The first bytes of an outlet, which is free again when the last view of them is gone."""
        if nbytes < _LEND_FROM or len(self._outlets) + self._taken <= DEPTH:
            data = _copy(outlet, nbytes)
            self.give_back(slot, outlet)
            return data
        self._taken -= 1
        self._slots.append(slot)
        lent = outlet.raw[:nbytes]
        outlets = self._outlets  # not self: the callback must not keep the ring
        outlet.lease = weakref.ref(lent, lambda _: outlets.append(outlet))
        return lent.data


def _copy(outlet: Outlet, nbytes: int) -> memoryview:
    if nbytes < _LEND_FROM:
        return memoryview(outlet.raw[:nbytes].tobytes())
    # torch lets go of the interpreter while it copies.
    data: memoryview = outlet.host[: nbytes // BF16].clone().view(torch.uint8).numpy().data
    return data


def _slot(streams: Streams, capacity: int) -> Slot:
    return Slot(
        streams.pinned(capacity),
        streams.on_device(capacity),
        streams.on_device(capacity),
        *(streams.event() for _ in range(3)),
    )


class Staging:
    """Batches through the device, in order; all but the lent answers is for the device thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._needed = 0  # elements of the largest x or y
        self._small: Ring | None = None
        self._large: Ring | None = None
        self.flights: deque[Flight] = deque()
        self._abandoned: list[Flight] = []

    def make_room(self, elements: int) -> None:
        """For batches whose x and y have at most so many elements; `allocate` then makes it."""
        self._needed = max(self._needed, elements)

    def allocate(self) -> None:
        """Make or enlarge the rings. Nothing may be under way."""
        small = min(SMALL, self._needed)
        if self._small is None or self._small.capacity < small:
            self._small = Ring(self._streams, small, SPARE_SMALL)
        if self._needed <= self._small.capacity:
            return
        if self._large is None or self._large.capacity < self._needed:
            self._large = None  # before the new one is there
            self._large = Ring(self._streams, self._needed, SPARE_LARGE)

    def full_for(self, program: Program, rows: int) -> bool:
        """Whether a batch has to wait until one under way has been received."""
        return len(self.flights) >= DEPTH or self._ring(program, rows).full

    def _ring(self, program: Program, rows: int) -> Ring:
        needed = rows * program.widest
        for ring in (self._small, self._large):
            if ring is not None and needed <= ring.capacity:
                return ring
        self.make_room(program.bucket * program.widest)
        self.allocate()
        return self._ring(program, rows)

    def send(self, program: Program, rows: int, fill: Fill) -> Flight:
        """Start a batch: `fill` writes BF16 [rows, k_pad] to the slot's host memory.

        What it raises leaves nothing under way that was not before.
        """
        ring = self._ring(program, rows)
        slot, outlet = ring.take()
        flight = Flight(program, rows, slot, outlet, ring)
        try:
            fill(slot)
            if program.mail is not None:
                self._pass_by_mail(flight, program.mail)
            elif self.flights:
                self._pass_through(flight)
            else:
                self._pass_alone(flight)
        except BaseException:
            program.x.spoil()
            self._settle(program.mail)
            ring.give_back(slot, outlet)
            raise
        self.flights.append(flight)
        return flight

    def _settle(self, mail: Mailbox | None) -> None:
        """After a failure: nothing runs any more, and what was posted for is forgotten."""
        self._streams.synchronize_all()
        if mail is not None:
            mail.restart()
            self._streams.synchronize_all()

    def _pass_by_mail(self, flight: Flight, mail: Mailbox) -> None:
        """The graph copies for itself."""
        program, slot, rows = flight.program, flight.slot, flight.rows
        mail.post(slot.host_at, flight.outlet.host_at, rows * program.x.k_pad, rows * program.n)
        program.run()
        self._streams.record(slot.done, self._streams.compute)
        program.x.loaded(rows, program.bucket)

    def _pass_alone(self, flight: Flight) -> None:
        """On one stream: there is nothing to overlap with, and going from one to another takes time."""
        program, slot, streams = flight.program, flight.slot, self._streams
        program.x.load(streams, slot.host_at, flight.rows, program.bucket)
        program.run()
        streams.copy(flight.outlet.host_at, program.y_at, flight.nbytes, streams.compute)
        streams.record(slot.done, streams.compute)

    def _pass_through(self, flight: Flight) -> None:
        """Copied in and out beside the batches before and after it, by way of device memory of its own."""
        program, slot, streams = flight.program, flight.slot, self._streams
        streams.copy(slot.x_at, slot.host_at, BF16 * flight.rows * program.x.k_pad, streams.copy_in)
        streams.record(slot.copied, streams.copy_in)
        streams.wait(streams.compute, slot.copied)
        program.x.load(streams, slot.x_at, flight.rows, program.bucket)
        program.run()
        streams.copy(slot.y_at, program.y_at, flight.nbytes, streams.compute)
        streams.record(slot.computed, streams.compute)
        streams.wait(streams.copy_out, slot.computed)
        streams.copy(flight.outlet.host_at, slot.y_at, flight.nbytes, streams.copy_out)
        streams.record(slot.done, streams.copy_out)

    @property
    def arrived(self) -> bool:
        """Whether the oldest batch under way has."""
        return self._streams.passed(self.flights[0].slot.done)

    def receive(self) -> Flight:
        """The oldest batch under way, once it has arrived; to be ended by `rows` and `give_back`, or `lend`.

        Errors: what the device raised for it, which is then under way no more.
        """
        flight = self.flights.popleft()
        try:
            self._streams.synchronize(flight.slot.done)
        except BaseException:
            flight.ring.give_back(flight.slot, flight.outlet)
            raise
        return flight

    def abandon(self) -> None:
        """Nothing is under way any more; what was keeps its memory, which a device may still write to."""
        self._abandoned += self.flights
        self.flights.clear()


def arrived(flight: Flight) -> Tensor:
    """y BF16 [rows, n] of a batch that was received, until its memory is given back."""
    n = flight.program.n
    return flight.outlet.host[: flight.rows * n].view(flight.rows, n)


def give_back(flight: Flight) -> None:
    flight.ring.give_back(flight.slot, flight.outlet)


def lend(flight: Flight) -> memoryview:
    """The bytes of y of a batch that was received; the memory behind them is not written to while a view is
    left."""
    return flight.ring.lend(flight.slot, flight.outlet, flight.nbytes)
