"""What every peer computes: y = x @ W.T of BF16 bytes, on one thread unless told otherwise."""

from __future__ import annotations

import os

import torch

N, K = (int(size) for size in os.environ["GEMM_NK"].split("x"))
torch.set_num_threads(int(os.environ.get("GEMM_THREADS", "1")))
WEIGHT = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def rows(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.bfloat16).view(-1, K)


@torch.inference_mode()
def multiply(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, WEIGHT)


def answer(body: bytes) -> bytes:
    return as_bytes(multiply(rows(body)))


def as_bytes(y: torch.Tensor) -> bytes:
    return y.view(torch.uint8).numpy().tobytes()
