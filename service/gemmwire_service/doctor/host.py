"""The facts of this host that decide which backends run: GPU, driver, CUDA, compiler, packages, folders."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from gemmwire_service import __version__
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.cuda_device import capability, dotted
from gemmwire_service.backends.flashinfer_offline import cubins, workspace
from gemmwire_service.cache import cache_folder

from .folders import unwritable

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
_SECONDS = 20
_VARIABLES = (
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_DISABLE_JIT",
    "FLASHINFER_NO_DOWNLOAD",
    "FLASHINFER_WORKSPACE_BASE",
)


@dataclass(frozen=True)
class Fact:
    """`name` is stable, for machines. `value` is None where there is none. `lacks` says what is missing or
    wrong and the way out; None is nothing."""

    name: str
    value: str | None
    lacks: str | None = None


def facts() -> Iterator[Fact]:
    yield Fact("gemmwire", __version__)
    yield Fact("python", f"{platform.python_version()} ({sys.executable})")
    yield Fact("platform", platform.platform())
    yield from _gpus()
    yield Fact("driver", _driver())
    yield Fact("driver_cuda", _driver_cuda())
    yield Fact("torch", torch.__version__)
    yield Fact("torch_cuda", torch.version.cuda)
    yield _nvcc()
    yield from _packages()
    yield _cubins()
    yield _workspace()
    yield _cache()
    yield _environment()


def _gpus() -> Iterator[Fact]:
    # An old driver, say, is told by a warning alone.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Fact("gpu", None, _no_gpu(told[0].message if told else None))
    for index in range(count):
        on = capability(torch.device("cuda", index))
        shown = f"compute capability {dotted(on)}" if on is not None else "not an NVIDIA GPU"
        yield Fact(f"gpu{index}", f"{torch.cuda.get_device_name(index)}, {shown}")


def _no_gpu(told: Warning | str | None) -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: a build with it is needed to use a GPU"
    return f"torch sees no CUDA device: {told}" if told else "torch sees no CUDA device"


def _driver() -> str | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return done.stdout.split()[0] if done.stdout.split() else None
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return found[0] if found else None


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver runs."""
    if not torch.cuda.is_available():
        return None
    number = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _nvcc() -> Fact:
    path = package.nvcc()
    if path is None:
        lacks = "not in CUDA_HOME, PATH or /usr/local/cuda: needed where FlashInfer compiles its kernels"
        return Fact("nvcc", None, lacks)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_SECONDS)
        found = re.search(r"release (\S+?),", done.stdout)
    except (OSError, subprocess.SubprocessError) as error:
        return Fact("nvcc", path, f"it does not run: {error}")
    return Fact("nvcc", f"{found[1] if found else 'of unknown version'} ({path})")


def _packages() -> Iterator[Fact]:
    found = package.versions()
    yield Fact("flashinfer-python", found.python, _of_other_version(found.python, "flashinfer-python"))
    if found.python is None:
        return
    for name, version, without in (
        ("flashinfer-cubin", found.cubin, None if _fetched() else "fetched from the network"),
        ("flashinfer-jit-cache", found.jit_cache, None if _compiled() else "compiled, for minutes,"),
    ):
        missing = f"not installed: kernels are {without} at the first call" if without else None
        yield Fact(name, version, missing if version is None else _of_other_version(version, name))
    yield Fact("nvidia-cutlass-dsl", package.installed("nvidia-cutlass-dsl"))


def _fetched() -> bool:
    """Whether the kernels of flashinfer-cubin are here without it."""
    value, lacks = cubins()
    return value is not None and lacks is None


def _compiled() -> bool:
    """Whether the kernels of flashinfer-jit-cache are here without it."""
    try:
        return not package.not_compiled(package.load())
    except Exception:  # FlashInfer's import raises anything, and another fact says so
        return False


def _of_other_version(version: str | None, name: str) -> str | None:
    if version is None:
        return f"not installed: {package.INSTALL}"
    if version.partition("+")[0] == package.VERSION:
        return None
    way_out = package.INSTALL if name == "flashinfer-python" else package.FETCH
    return f"{package.VERSION} is needed: {way_out}"


def _cubins() -> Fact:
    if package.installed("flashinfer-python") is None:
        return Fact("cubins", None, "no FlashInfer to need them")
    return Fact("cubins", *cubins())


def _workspace() -> Fact:
    folder = workspace()
    return Fact("flashinfer_workspace", str(folder), unwritable(folder))


def _cache() -> Fact:
    folder = cache_folder(os.environ.get("GEMMWIRE_CACHE_DIR", "auto"))
    if folder is None:
        return Fact("cache_dir", None, "this user has no home: give a folder with --cache-dir")
    return Fact("cache_dir", str(folder), unwritable(folder))


def _environment() -> Fact:
    found = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return Fact("environment", " ".join(f"{name}={value}" for name, value in found.items()) or None)
