"""What a server says, as frozen facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Answer:
    """One forward: y `[..., N]`, and what made it.

    `version` names the weights. The same row of x has the same bits in y where `version`, `backend` and
    `bucket` (the M that the device ran) are the same. `bucket`, `queue_us` and `device_us` (microseconds) are
    None for an answer that no device made: that of no rows. `outputs` has what was asked for by its name, of
    a fused layer also its parts; y is None where it was not.
    """

    y: Any
    version: str
    backend: str
    bucket: int | None
    queue_us: int | None
    device_us: int | None
    request_id: str
    outputs: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class LayerInfo:
    """A served layer: y[..., n] = x[..., k] @ W.T (+ b). `bias` is None where the server did not say.

    `state` is "READY", or why there is no answer from it now, with `reason` beside it. `config` is everything
    else that the server says of it: buckets, the backends that were passed over and why, errors measured, ...
    """

    name: str
    n: int
    k: int
    version: str
    state: str
    backend: str
    reason: str = ""
    bias: bool | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Refitted:
    """A layer whose weight was replaced: answers of `version` were computed with the new one.

    `quantization_error` is that of the new weight, None for one that was sent in MXFP8; `arithmetic_error`
    that of the backend on it. `seconds` says what the server spent on each stage. `hosts`, of a client of
    several servers, has what each of them says, by its URL; the rest is what the first one says.
    """

    name: str
    version: str
    previous_version: str
    quantization_error: float | None
    arithmetic_error: float | None
    seconds: Mapping[str, float]
    hosts: Mapping[str, Refitted] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class ServerInfo:
    """A server; `extensions` are the protocol's, such as "binary_tensor_data"."""

    name: str
    version: str
    extensions: tuple[str, ...]
