"""What GPU a device is: asked in this one place, by every backend whose kernels are for some GPUs alone."""

from __future__ import annotations

import torch


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device of this machine; None for any other device."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def missing(device: torch.device, least: tuple[int, int]) -> str:
    """Why a device without a capability cannot run what needs `least`."""
    if device.type == "cuda" and torch.version.hip is None:
        return f"torch {torch.__version__} sees no CUDA device here"
    kind = "an AMD GPU" if device.type == "cuda" else device.type
    return f"needs an NVIDIA GPU of compute capability {dotted(least)} or higher, not {kind}"


def dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
