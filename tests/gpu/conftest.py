"""A GPU and its backends. What the machine lacks, a test is skipped for with the sentence that says what.

Nothing in this folder needs the server's packages: torch, pytest and, for its part, FlashInfer are enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gemmwire_service.backends.base import Backend
from gemmwire_service.capture import capture_stream
from kernels import KERNELS
from on_gpu import REHEARSAL, available

ALL = [
    pytest.param("emulation", marks=pytest.mark.gpu),
    pytest.param("emulation_e4m3", marks=pytest.mark.gpu),
    *(pytest.param(name, marks=pytest.mark.sm100) for name in KERNELS),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if REHEARSAL:
        from sm100 import simulate

        simulate(monkeypatch)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA device: torch {torch.__version__} sees none")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def stream(device: torch.device) -> torch.cuda.Stream | None:
    """That of the server: graphs that were captured on one stream share FlashInfer's workspace."""
    return capture_stream(device) if device.type == "cuda" else None


@pytest.fixture(autouse=True)
def _told_to_the_report(request: pytest.FixtureRequest) -> None:
    """The JUnit file says which tests are of SM100."""
    if request.node.get_closest_marker("sm100"):
        request.node.user_properties.append(("sm100", "yes"))


@pytest.fixture(autouse=True)
def _no_kernel_failed_later() -> Iterator[None]:
    """A kernel that read or wrote out of bounds fails the test that ran it, not one that comes after."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture(params=ALL)
def backend(request: pytest.FixtureRequest, device: torch.device) -> Backend:
    """Each backend; all but emulation are marked sm100."""
    return available(request.param, device)
