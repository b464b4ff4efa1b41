"""One infer request on a connection, from its head to its answer."""

from __future__ import annotations

import time

from .backlog import Item
from .body import aligned
from .call import Call
from .head import Head
from .layer import Layer
from .repeat import Repeat

_NOTHING = memoryview(b"")


class Exchange:
    """One request under way: its body as it comes, then its place at the engine."""

    __slots__ = ("began", "body", "call", "coming", "head", "item", "layer", "missing", "repeats")

    def __init__(self, head: Head, layer: Layer, repeats: Repeat | None = None) -> None:
        """One that `repeats` another has come as a whole, and its numbers are wherever its call has them."""
        self.head = head
        self.layer = layer
        self.repeats = repeats
        self.began = time.monotonic_ns()
        self.body = aligned(head.length, head.offset) if repeats is None else _NOTHING
        self.missing = self.coming = len(self.body)
        self.call: Call | None = None
        self.item: Item | None = None

    def rest(self) -> memoryview:
        return self.body[len(self.body) - self.missing :]
