"""An answer as the protocol has it: y, what made it, and how long that took."""

from __future__ import annotations

from functools import lru_cache

from gemmwire import wire
from gemmwire.wire import Buffer, InferResponse, Tensor

from .backends.base import LayerSpec
from .backlog import Answer
from .call import Call
from .outputs import OUTPUT, Columns, cut

LONGEST_ID = 128  # of a request whose answer's text is remembered


def encode(
    call: Call, spec: LayerSpec, version: int, backend: str, answer: Answer | None
) -> tuple[dict[str, str], list[Buffer]]:
    """-> (headers, buffers). `answer` None is the answer of no rows, which no device made."""
    if answer is not None and call.binary and len(call.id) <= LONGEST_ID and call.has_place:
        text = text_of(call, spec, answer)
        if call.columns:
            return {"content-type": "application/json"}, [text]
        return wire.binary_message(text, [answer.data])
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


def text_of(call: Call, spec: LayerSpec, answer: Answer) -> bytes:
    """The JSON part of a binary answer, which has a place for y in its body or in shared memory."""
    _, version, backend, bucket, queue_us, device_us = answer
    shape = call.x.shape[:-1]
    before, after = _around_times(
        spec.name, version, backend, bucket, call.id, call.datatype, shape, spec.n, call.columns
    )
    return f'{before}"queue_us":{queue_us},"device_us":{device_us}{after}'.encode()


@lru_cache(maxsize=256)
def _around_times(
    name: str,
    version: int,
    backend: str,
    bucket: int,
    id: str,
    datatype: str,
    shape: tuple[int, ...],
    n: int,
    columns: tuple[Columns, ...],
) -> tuple[str, str]:
    """What the encoder writes before the times, and after them. `shape` is that of y [*shape, n]."""
    outputs = tuple(
        Tensor(each.name, datatype, (*shape, each.stop - each.start), b"", each.shared)
        for each in columns or (Columns(OUTPUT, 0, n, True),)
    )
    parameters: wire.Parameters = {"backend": backend, "bucket": bucket, "queue_us": 0, "device_us": 0}
    message = InferResponse(name, str(version), outputs, id, parameters)
    _, buffers = wire.encode_response(message, [True] * len(outputs))
    before, _, after = bytes(buffers[0]).decode().rstrip().rpartition('"queue_us":0,"device_us":0')
    return before, after


def _parameters(answer: Answer) -> wire.Parameters:
    return {
        "backend": answer.backend,
        "bucket": answer.bucket,
        "queue_us": answer.queue_us,
        "device_us": answer.device_us,
    }
