"""The kinds of shared memory that a server offers, by its settings."""

from __future__ import annotations

from . import shm_system
from .cache import cache_folder
from .errors import SettingsError
from .settings import Settings
from .shm import Opener
from .shm_cuda import CudaOpener
from .shm_driver import DriverDevice
from .shm_system import SystemOpener


def openers_of(settings: Settings, device: str) -> tuple[Opener, ...]:
    """None unless a setting says so. Errors: SettingsError where this machine has no such memory."""
    openers: list[Opener] = []
    if settings.shm_prefix:
        reason = shm_system.unavailable()
        if reason is not None:
            raise SettingsError(
                f"--shm-prefix is {settings.shm_prefix!r}, but {reason}", got=settings.shm_prefix
            )
        openers.append(SystemOpener(settings.shm_prefix, cache_folder(settings.cache_dir)))
    if settings.cuda_shm:
        openers.append(CudaOpener(_device(device)))
    return tuple(openers)


def _device(name: str) -> DriverDevice:
    kind, _, index = name.partition(":")
    if kind != "cuda":
        raise SettingsError(f"--cuda-shm needs a CUDA device, but the server computes on {name}", got=name)
    return DriverDevice(int(index or 0))
