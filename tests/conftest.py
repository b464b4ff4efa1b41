"""Fixtures that several suites share: a small checkpoint with ragged layers, and a server of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from oracle import spread

if TYPE_CHECKING:
    from serving import Served

# name -> (N, K): K below a block, not a multiple of it, and many blocks; N of 1 and ragged.
SHAPES = {"plain": (64, 128), "ragged": (130, 33), "one": (1, 341), "wide": (96, 512)}
BIASED = ("ragged", "wide")


@pytest.fixture(scope="session")
def weights() -> dict[str, Tensor]:
    """The checkpoint's tensors, FP32: `<layer>.weight` [N, K] and for some `<layer>.bias` [N]."""
    tensors = {f"{name}.weight": spread(n, k, seed=n + k) / 2**14 for name, (n, k) in SHAPES.items()}
    return tensors | {f"{name}.bias": spread(1, SHAPES[name][0], seed=7)[0] for name in BIASED}


@pytest.fixture(scope="session")
def checkpoint(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file({name: tensor.to(torch.float32) for name, tensor in weights.items()}, path)
    return path


@pytest.fixture(scope="session", params=(True, False), ids=("fast-path", "asgi"))
def server(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The small checkpoint as `m.<layer>`, and the demo as `demo.<layer>`, on a real socket.

    Twice, for infer comes by two paths, and every rule of the protocol holds for both.
    """
    # Here, because tests/gpu runs where the server's packages are not installed.
    from serving import serving, settings

    with serving(settings(model=(f"m={checkpoint}", "demo=glassllm"), fast_path=request.param)) as served:
        yield served
