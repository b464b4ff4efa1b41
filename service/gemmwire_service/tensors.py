"""Between the bytes of a request or an answer and torch's tensors of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .backlog import Item
from .inputs import QUANTIZED
from .mxfp8.rows import rows_of

TORCH_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


def matrix(item: Item) -> Tensor:
    """The request's x as [rows, K]: a view of the bytes that came; BF16 made of quantized ones."""
    view = memoryview(item.x.data)
    if view.readonly:  # numbers that came as JSON; torch takes writable memory only
        view = memoryview(bytearray(view))
    k = item.layer.spec.k
    if item.x.datatype == QUANTIZED:
        codes, scales = torch.frombuffer(view, dtype=torch.uint8).tensor_split([item.rows * k])
        return rows_of(codes.view(item.rows, k), scales.view(item.rows, -1))
    return torch.frombuffer(view, dtype=TORCH_DTYPES[item.x.datatype]).view(item.rows, k)


def as_bytes(y: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which they keep alive. It is not empty.

    By one operator, each of which gives Python's lock away and has to get it back.
    """
    data: memoryview = y.view(torch.uint8).numpy().data
    return data.cast("B")
