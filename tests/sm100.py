"""A machine with a GPU that is not there, as the backends see it: a capability, packages, and a simulator."""

from __future__ import annotations

import sys

import pytest
import torch

import flashinfer_sim
import scaled_mm_sim
from gemmwire_service.backends import cuda_device, flashinfer_package, flashinfer_quantizer

CPU = torch.device("cpu")
PACKAGES = {"flashinfer-python": "0.7.4", "flashinfer-cubin": "0.7.4", "flashinfer-jit-cache": "0.7.4+cu130"}


def simulate(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int] | None = (10, 0),
    packages: dict[str, str] | None = None,
    **machine: object,
) -> flashinfer_sim.Machine:
    """Until the test ends, the CPU is a GPU of this capability, and FlashInfer and cuBLAS are simulated."""
    cc = 10 * capability[0] + capability[1] if capability else 0
    simulated = flashinfer_sim.Machine(capability=cc, **machine)  # type: ignore[arg-type]
    monkeypatch.setattr(flashinfer_sim, "MACHINE", simulated)
    for name in ("flashinfer", "flashinfer.cute_dsl", "flashinfer.batch_invariant"):
        monkeypatch.setitem(sys.modules, name, flashinfer_sim)
    monkeypatch.setitem(sys.modules, "flashinfer.cute_dsl.availability", flashinfer_sim)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm_sim.scaled_mm)
    monkeypatch.setattr(cuda_device, "capability", lambda device: capability)
    monkeypatch.setattr(flashinfer_package, "installed", (PACKAGES if packages is None else packages).get)
    monkeypatch.setattr(flashinfer_package, "nvcc", lambda: None)
    monkeypatch.setattr(flashinfer_quantizer, "QUANTIZER", flashinfer_quantizer.Quantizer())
    for name in ("FLASHINFER_CUBIN_DIR", "FLASHINFER_DISABLE_JIT", "FLASHINFER_NO_DOWNLOAD"):
        monkeypatch.delenv(name, raising=False)
    return simulated


def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
