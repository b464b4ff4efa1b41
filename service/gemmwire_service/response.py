"""An answer as the protocol has it: y, what made it, and how long that took."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gemmwire import wire
from gemmwire.wire import Buffer, InferResponse, Tensor

from .backends.base import LayerSpec
from .backlog import Answer
from .call import Call
from .outputs import OUTPUT, Columns, cut

_TIMES = '"queue_us":{},"device_us":{}'
_LONGEST_ID = 128  # of a request whose answer's text is remembered


def encode(
    call: Call, spec: LayerSpec, version: int, backend: str, answer: Answer | None
) -> tuple[dict[str, str], list[Buffer]]:
    """-> (headers, buffers). `answer` None is the answer of no rows, which no device made."""
    if answer is not None and call.binary and len(call.id) <= _LONGEST_ID and call.has_place:
        made_by = answer.version, answer.backend, answer.bucket
        shape = call.x.shape[:-1]
        text = _text(spec.name, *made_by, call.id, call.datatype, shape, spec.n, call.columns)
        return text.around(answer)
    data = b"" if answer is None else answer.data
    columns = call.columns or (Columns(OUTPUT, 0, spec.n, call.binary),)
    outputs = tuple(
        Tensor(
            each.name,
            call.datatype,
            call.shape(each.stop - each.start),
            b"" if each.shared is not None else cut(data, call.rows, spec.n, each),
            each.shared,
        )
        for each in columns
    )
    parameters: wire.Parameters = {"backend": backend} if answer is None else _parameters(answer)
    served = version if answer is None else answer.version
    message = InferResponse(spec.name, str(served), outputs, call.id, parameters)
    return wire.encode_response(message, [each.binary for each in columns])


class _Text(NamedTuple):
    """The JSON part of binary answers that differ in nothing but their times and numbers."""

    before: str
    after: str
    body: bool  # y is behind it, and not in shared memory

    def around(self, answer: Answer) -> tuple[dict[str, str], list[Buffer]]:
        times = _TIMES.format(answer.queue_us, answer.device_us)
        text = (self.before + times + self.after).encode()
        if self.body:
            return wire.binary_message(text, [answer.data])
        return {"content-type": "application/json"}, [text]


@lru_cache(maxsize=256)
def _text(
    name: str,
    version: int,
    backend: str,
    bucket: int,
    id: str,
    datatype: str,
    shape: tuple[int, ...],
    n: int,
    columns: tuple[Columns, ...],
) -> _Text:
    """As the encoder writes it, with a place for the times. `shape` is that of y [*shape, n]."""
    outputs = tuple(
        Tensor(each.name, datatype, (*shape, each.stop - each.start), b"", each.shared)
        for each in columns or (Columns(OUTPUT, 0, n, True),)
    )
    parameters: wire.Parameters = {"backend": backend, "bucket": bucket, "queue_us": 0, "device_us": 0}
    message = InferResponse(name, str(version), outputs, id, parameters)
    _, buffers = wire.encode_response(message, [True] * len(outputs))
    before, _, after = bytes(buffers[0]).decode().rstrip().rpartition(_TIMES.format(0, 0))
    return _Text(before, after, not columns)


def _parameters(answer: Answer) -> wire.Parameters:
    return {
        "backend": answer.backend,
        "bucket": answer.bucket,
        "queue_us": answer.queue_us,
        "device_us": answer.device_us,
    }
