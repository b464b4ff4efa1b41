"""Open Inference Protocol v2 over HTTP, as bytes: the one codec, used by both ends.

A message is a JSON object, or, with the binary tensor data extension, a JSON object of
`Inference-Header-Content-Length` bytes followed by the raw little-endian tensors of those inputs or
outputs that carry `parameters.binary_data_size`, in order. A decoded tensor is a view of the body; nothing
is copied. Sizes are checked in Python integers, before anything is allocated, and must add up to the body
exactly. Every refusal is a `WireError`.
"""

from __future__ import annotations

from .decode import decode_raw_request, decode_request, decode_response, header_length
from .encode import aligned, binary_message, buffers_size, encode_request, encode_response
from .errors import WireError
from .messages import (
    HEADER_LENGTH,
    ITEMSIZE,
    Buffer,
    InferRequest,
    InferResponse,
    Limits,
    Parameters,
    RequestedOutput,
    Shared,
    Tensor,
)

__all__ = [
    "HEADER_LENGTH",
    "ITEMSIZE",
    "Buffer",
    "InferRequest",
    "InferResponse",
    "Limits",
    "Parameters",
    "RequestedOutput",
    "Shared",
    "Tensor",
    "WireError",
    "aligned",
    "binary_message",
    "buffers_size",
    "decode_raw_request",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "header_length",
]
