"""What the device thread hands to the event loop: what became of some requests."""

from __future__ import annotations

from typing import NamedTuple

from gemmwire.wire import Buffer

from .backlog import Answer, Item
from .errors import DeviceLost
from .layer import Layer
from .stats import BatchTimes


class Done(NamedTuple):
    """What became of some requests: an Answer or an error each, None where it was dropped.

    `lost`: the device can do nothing more, now or since an earlier failure.
    """

    items: list[Item]
    outcomes: list[Answer | Exception | None]
    bucket: int = 0
    times: BatchTimes | None = None
    forwards: int = 1
    lost: DeviceLost | None = None


def answer(item: Item, data: Buffer, layer: Layer, bucket: int, times: BatchTimes) -> Answer:
    """data: y [rows, N] in the item's datatype."""
    return Answer(
        data,
        layer.version,
        layer.routes.by_bucket[bucket].backend.name,
        bucket,
        (times.began - item.arrived) // 1000,
        times.device // 1000,
    )
