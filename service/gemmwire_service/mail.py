"""How a graph that was captured once finds the memory of each request: it looks into a mailbox.

A small batch spends more time between copy, graph and copy than in any of them. So its graph does the copying
too: it takes x from pinned memory and puts y there, wherever the entry that was posted for it says. Entries
are taken in turn, one a replay; replays are in one stream, hence in the order of the posts.
"""

from __future__ import annotations

import logging
import struct
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger("gemmwire.mail")

SLOTS = 16  # more than there are batches under way
_ENTRY = struct.Struct("qqqq")


class Kernels(Protocol):
    """Both for the current stream, within a capture or not; a replay that has been brought and sent for has
    had its turn."""

    def bring(self, entries: Tensor, turn: Tensor, x: Tensor, slots: int) -> None:
        """x, BF16 [bucket, k_pad]: what the entry says, then zeros."""

    def send(self, entries: Tensor, turn: Tensor, done: Tensor, y: Tensor, slots: int) -> None:
        """y, BF16 [bucket, n], to where the entry says; the turn is the next entry's."""


class Mailbox:
    """One of a device."""

    def __init__(self, kernels: Kernels, pinned: Tensor, device: torch.device) -> None:
        """pinned: at least 4 * SLOTS int64 in host memory that the device reads."""
        self._kernels = kernels
        self._entries = pinned
        self._raw = pinned.numpy().data.cast("B")
        with torch.inference_mode(False):
            self._turn = torch.zeros(1, dtype=torch.int64, device=device)
            self._done = torch.zeros(1, dtype=torch.int32, device=device)
        self._next = 0

    def post(self, source: int, target: int, x: int, y: int) -> None:
        """For the next replay: the addresses of x and y, aligned to 16 bytes, and their elements."""
        at = (self._next % SLOTS) * _ENTRY.size
        _ENTRY.pack_into(self._raw, at, source, target, x, y)
        self._next += 1

    def bring(self, x: Tensor) -> None:
        self._kernels.bring(self._entries, self._turn, x, SLOTS)

    def send(self, y: Tensor) -> None:
        self._kernels.send(self._entries, self._turn, self._done, y, SLOTS)

    def restart(self) -> None:
        """Nothing is under way, and a replay that was posted for may not have run."""
        self._turn.zero_()
        self._done.zero_()
        self._next = 0


def mailbox(device: torch.device) -> Mailbox | None:
    """None where there are no kernels for it: batches are then copied before and after their graphs."""
    kernels = _kernels()
    if kernels is None:
        return None
    pinned = torch.zeros(4 * SLOTS, dtype=torch.int64, pin_memory=True)
    return Mailbox(kernels, pinned, device)


@cache
def _kernels() -> Kernels | None:
    try:
        from . import mail_triton
    except ImportError as error:
        log.warning("graphs do not copy for themselves: Triton cannot be imported (%s)", error)
        return None
    return mail_triton
