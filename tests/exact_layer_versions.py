"""A layer whose every version has a known answer: exact data, and one rounding is all of the arithmetic."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from oracle import reference, rounded_once, sparse

N, K, ROWS = 96, 128, 3
LAYER = "r"
X = sparse(ROWS, K, torch.Generator().manual_seed(100))


def weight(version: int) -> Tensor:
    """FP32 [N, K], exact in E4M3; version 1 is the checkpoint's."""
    return sparse(N, K, torch.Generator().manual_seed(version))


def expected(version: int) -> Tensor:
    """BF16 [ROWS, N]: the same in every order of summation, at any M."""
    return rounded_once(reference(X, weight(version)))


def checkpoint(folder: Path, layers: tuple[str, ...] = (LAYER,)) -> str:
    """-> the path of one whose layers are all in version 1."""
    path = folder / "model.safetensors"
    save_file({f"{layer}.weight": weight(1) for layer in layers}, path)
    return str(path)
