"""What an Open Inference Protocol v2 message holds, as frozen facts, and what a decoder accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Buffer = bytes | bytearray | memoryview
Parameters = Mapping[str, bool | int | float | str]

HEADER_LENGTH = "inference-header-content-length"

ITEMSIZE: dict[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}


@dataclass(frozen=True)
class Limits:
    """What a decoder accepts. Bytes; `rank` is the number of dimensions of one tensor."""

    json_bytes: int = 16 << 20
    rank: int = 16
    tensors: int = 16


class Shared(NamedTuple):
    """Where in a shared-memory region a tensor lies: `nbytes` bytes from `offset`."""

    region: str
    offset: int
    nbytes: int


class Tensor(NamedTuple):
    """A named tensor: `data` holds prod(shape) little-endian elements of `datatype`, row-major.

    One that is `shared` lies in the region instead; `data` is then empty.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer
    shared: Shared | None = None


@dataclass(frozen=True)
class RequestedOutput:
    """An output that the caller asks for; `binary` None leaves the choice to the request.

    One that is `shared` is wanted there and not in the answer's body.
    """

    name: str
    binary: bool | None = None
    datatype: str | None = None
    shared: Shared | None = None


@dataclass(frozen=True)
class InferRequest:
    """One call. `outputs` None asks for all of them; `binary_outputs` is what they default to."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...] | None = None
    binary_outputs: bool = False
    id: str = ""
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class InferResponse:
    """One answer; `model_version` names the weights that made it."""

    model_name: str
    model_version: str
    outputs: tuple[Tensor, ...]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
