"""What the device thread hands to the event loop: what became of some requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def answers(
    items: Sequence[Item], data: Iterable[Buffer], layer: Layer, bucket: int, times: BatchTimes
) -> list[Answer | Exception | None]:
    """Of one forward; data: y [rows, N] of each, in the item's datatype."""
    version, backend = layer.version, layer.routes.by_bucket[bucket].backend.name
    began, device_us = times.began, times.device // 1000
    return [
        Answer(y, version, backend, bucket, (began - item.arrived) // 1000, device_us)
        for item, y in zip(items, data, strict=True)
    ]
