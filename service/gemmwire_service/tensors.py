"""Between the bytes of a request or an answer and torch's tensors of them."""

from __future__ import annotations

import torch
from torch import Tensor

from .backlog import Item

TORCH_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


def matrix(item: Item) -> Tensor:
    """The request's tensor as [rows, K], a view of the bytes that came."""
    view = memoryview(item.x.data)
    if view.readonly:  # numbers that came as JSON; torch takes writable memory only
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=TORCH_DTYPES[item.x.datatype]).view(item.rows, item.layer.spec.k)


def as_bytes(y: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, which they keep alive."""
    data: memoryview = y.view(-1).view(torch.uint8).numpy().data
    return data
