"""Which FlashInfer is installed, and whether it runs a GEMM backend of its own on this machine.

That FlashInfer imports says little: below compute capability 10.0 its MXFP8 quantizer is compiled to nothing
and returns uninitialised memory without an error, and it imports beside kernels of another version. So the
answer takes the capability, the versions of its packages, the symbols used here and FlashInfer's own table of
what each of its backends supports. Each reason says what is missing and the way out.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemmwire_service.backends import cuda_device
from gemmwire_service.backends.cuda_device import dotted

VERSION = "0.7.4"  # the extra `gpu` pins it: layouts and signatures change between releases
SYMBOLS = ("MeasurementPolicy", "ReplayCoverage", "SfLayout", "autotune_v2", "mm_mxfp8", "mxfp8_quantize")
QUANTIZES_FROM = (10, 0)  # the device code of `mxfp8_quantize` is under __CUDA_ARCH__ >= 1000
CUDA_FROM = (12, 8)  # the first CUDA with compute capability 10.0
MODULES = {
    "mxfp8_quantization_sm100": "jit.fp8_quantization.gen_mxfp8_quantization_sm100_module",
    "mxfp8_gemm_cutlass": "jit.gemm.core.gen_gemm_sm100_module_cutlass_mxfp8",
    "trtllm_utils": "jit.tllm_utils.gen_trtllm_utils_module",  # its tuner delays a stream with it
    "trtllm_gemm": "jit.gemm.core.gen_trtllm_gen_gemm_module",
}
"""What it compiles of the kernels used here, unless it is there: what makes the specification, by the name.
Kernels in CuTe DSL are not among them: FlashInfer compiles those in Python, without nvcc."""
INSTALL = "pip install 'gemmwire[gpu]'"
FETCH = "run flashinfer download-kernels, which installs those of its version"


@dataclass(frozen=True)
class Versions:
    """FlashInfer's packages as installed, None for one that is not. `jit_cache` may end in +cu130."""

    python: str | None
    cubin: str | None
    jit_cache: str | None


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Versions:
    return Versions(
        installed("flashinfer-python"), installed("flashinfer-cubin"), installed("flashinfer-jit-cache")
    )


def cuda_home(environ: Mapping[str, str] = os.environ) -> Path:
    """What FlashInfer takes for the CUDA toolkit: CUDA_HOME, CUDA_PATH, where nvcc is, or /usr/local/cuda."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc")
        home = str(Path(found).parent.parent) if found else "/usr/local/cuda"
    return Path(home)


def nvcc(environ: Mapping[str, str] = os.environ) -> str | None:
    """The compiler FlashInfer would use."""
    compiler = cuda_home(environ) / "bin" / "nvcc"
    return str(compiler) if compiler.exists() else None


def aot_folder(flashinfer: Any) -> Path | None:
    """Where FlashInfer looks for NAME/NAME.so before it compiles a module; it takes that as it is."""
    folders = list(getattr(flashinfer, "__path__", ()))
    return Path(folders[0]) / "data" / "aot" if folders else None


def not_compiled(flashinfer: Any) -> list[str]:
    """The modules that are not in that folder, where the build of a container image puts them."""
    folder = aot_folder(flashinfer)
    return [name for name in MODULES if folder is None or not (folder / name / f"{name}.so").is_file()]


def load() -> Any:
    """The module. Raises whatever its import raises, which can be any exception, not ImportError alone."""
    with warnings.catch_warnings():
        # FlashInfer uses names of nvidia-cutlass-dsl that newer releases of it deprecate.
        warnings.filterwarnings("ignore", r"cutlass\.\S+ is deprecated", DeprecationWarning)
        import flashinfer
    return flashinfer


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why FlashInfer's GEMM `backend`, by FlashInfer's name for it, does not run on `device`, or None."""
    return next(_reasons(backend, device), None)


def no_batch_invariant(device: torch.device) -> str | None:
    """Why FlashInfer's batch-invariant mode does not run on `device`, or None. The mode is no backend of
    mm_mxfp8, so its own registry is asked."""
    on = cuda_device.capability(device)
    reason = unavailable("cute-dsl", device) or no_cute_dsl(on)
    if reason is not None or on is None:
        return reason
    from flashinfer.batch_invariant import fingerprint

    try:
        fingerprint("mm_mxfp8", N=128, K=128, out_dtype=torch.bfloat16, arch=f"sm_{on[0]}{on[1]}")
    except ValueError as error:
        return f"FlashInfer has no batch-invariant kernels for compute capability {dotted(on)}: {error}"
    return None


def no_cubins(environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the kernels that are shipped as cubins cannot be had, or None: they are here or can be fetched."""
    if installed("flashinfer-cubin") or environ.get("FLASHINFER_CUBIN_DIR"):
        return None
    if not environ.get("FLASHINFER_NO_DOWNLOAD"):
        return None
    return f"its kernels are not here, and FLASHINFER_NO_DOWNLOAD forbids fetching them: {FETCH}, or unset it"


def no_cute_dsl(on: tuple[int, int] | None = None) -> str | None:
    """Why kernels written in CuTe DSL cannot be compiled (for a compute capability), or None."""
    load()
    from flashinfer.cute_dsl.availability import is_cute_dsl_arch_supported, is_cute_dsl_available

    if not is_cute_dsl_available():
        return f"nvidia-cutlass-dsl, which compiles it, is not installed: {INSTALL}"
    if on is None or is_cute_dsl_arch_supported(*on):
        return None
    return (
        f"the installed nvidia-cutlass-dsl ({installed('nvidia-cutlass-dsl')}) cannot compile for compute "
        f"capability {dotted(on)}: a newer one may"
    )


def _reasons(backend: str, device: torch.device) -> Iterator[str]:
    """The questions from cheap to dear, each asked only where those before it found nothing wrong."""
    on = cuda_device.capability(device)
    if on is None:
        yield cuda_device.missing(device, QUANTIZES_FROM)
        return
    if on < QUANTIZES_FROM:
        yield (
            f"compute capability {dotted(on)}: FlashInfer's MXFP8 quantizer is compiled for "
            f"{dotted(QUANTIZES_FROM)} and higher, and returns uninitialised memory below"
        )
        return
    yield from wrong_versions(versions())
    try:
        flashinfer = load()
    except Exception as error:  # 0.6.x raises AssertionError where torch has no CUDA, others OSError
        yield f"import flashinfer fails: {type(error).__name__}: {error}; {INSTALL}"
        return
    yield from wrong_module(flashinfer)
    yield from _no_compiler(flashinfer)
    if not flashinfer.mm_mxfp8.is_backend_supported(backend, 10 * on[0] + on[1]):
        yield (
            f"FlashInfer {flashinfer.__version__} has no {backend} kernels for compute capability "
            f"{dotted(on)}"
        )


def wrong_versions(found: Versions) -> Iterator[str]:
    """What is wrong with the packages that are installed, a sentence each."""
    if found.python is None:
        yield f"FlashInfer is not installed: {INSTALL}"
    elif _release(found.python) != VERSION:
        yield (
            f"flashinfer-python is {found.python}, and this version calls {VERSION}, whose layouts and "
            f"signatures others do not share: {INSTALL}"
        )
    for name, version in (("cubin", found.cubin), ("jit-cache", found.jit_cache)):
        if version is not None and _release(version) != VERSION:
            yield (
                f"flashinfer-{name} is {version} beside flashinfer-python {found.python}, which would "
                f"fetch or compile its kernels instead: {FETCH}, or uninstall it"
            )
    yield from _wrong_cuda(found, torch.version.cuda)


def _wrong_cuda(found: Versions, cuda: str | None) -> Iterator[str]:
    """`cuda` is the version torch is built for, None for a build without."""
    if cuda is None:
        return
    major, minor = (int(part) for part in cuda.split(".")[:2])
    if (major, minor) < CUDA_FROM:
        yield (
            f"torch {torch.__version__} is built for CUDA {cuda}, and {dotted(CUDA_FROM)} is the first with "
            "compute capability 10.0: install a newer build"
        )
    compiled_for = (found.jit_cache or "").partition("+cu")[2]
    if compiled_for and compiled_for[:2] != str(major):
        yield (
            f"flashinfer-jit-cache {found.jit_cache} is compiled for another CUDA than torch, which is "
            f"built for {cuda}: {FETCH}"
        )


def wrong_module(flashinfer: Any) -> Iterator[str]:
    """The module that was imported, which can be another than the one pip knows of."""
    version = getattr(flashinfer, "__version__", "of no version")
    if _release(version) != VERSION:
        yield f"the flashinfer that Python imports is {version}, not {VERSION}: {INSTALL}"
    lacks = [symbol for symbol in SYMBOLS if not hasattr(flashinfer, symbol)]
    if lacks:
        yield f"the installed FlashInfer lacks {', '.join(lacks)}: {INSTALL}"
    elif not hasattr(flashinfer.mm_mxfp8, "is_backend_supported"):
        yield f"mm_mxfp8 of the installed FlashInfer cannot tell what it supports: {INSTALL}"


def _no_compiler(flashinfer: Any) -> Iterator[str]:
    """FlashInfer compiles what neither flashinfer-jit-cache nor its own folder holds, at the first call."""
    if installed("flashinfer-jit-cache") is not None or not not_compiled(flashinfer):
        return
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        yield (
            "flashinfer-jit-cache is not installed, and FLASHINFER_DISABLE_JIT forbids compiling instead: "
            f"{FETCH}, or unset it"
        )
    elif nvcc() is None:
        yield (
            "FlashInfer has to compile its kernels and finds no nvcc in CUDA_HOME, PATH or /usr/local/cuda: "
            f"install the CUDA toolkit, or {FETCH}"
        )
    elif not (cuda_home() / "include" / "cuda_runtime.h").exists():
        yield (
            f"FlashInfer takes {cuda_home()} for the CUDA toolkit, by its nvcc, and finds no headers there: "
            f"set CUDA_HOME to the toolkit's folder, or {FETCH}"
        )


def _release(version: str) -> str:
    return version.partition("+")[0]
