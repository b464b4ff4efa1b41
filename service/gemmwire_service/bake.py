"""Make an image that fetches and compiles nothing when it runs: `python -m gemmwire_service.bake COMMAND`.

    compile [NAME...]  FlashInfer's modules, into its own folder; needs nvcc, and FLASHINFER_CUDA_ARCH_LIST
    fetch              FlashInfer's TensorRT-LLM GEMM kernels, into FLASHINFER_CUBIN_DIR; needs the network
    check              that all of it is here, whole, of the right versions and for the right GPUs

The Dockerfile's target gpu is built with the first two, and the third is its last step. Neither a GPU nor its
driver is needed. The exit status is 0 where everything is as it must be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from .backends import flashinfer_package as package
from .backends.flashinfer_modules import HOST_ONLY, ModuleError, architectures, compile_modules, library
from .backends.flashinfer_offline import damaged, fetch

ARCHITECTURES = {100, 103}  # sm_100a and sm_103a
ARCHITECTURE_LIST = "10.0a 10.3a"  # the same, as FlashInfer's variable has them
OFFLINE = ("FLASHINFER_NO_DOWNLOAD", "FLASHINFER_DISABLE_JIT", "FLASHINFER_CUBIN_DIR")
TRITON_MADE = Path(sys.prefix) / "lib" / "triton"  # where docker/cc has Triton's driver module from


def faults(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What is wrong with this image, a sentence each; nothing where it is complete."""
    yield from _other_versions()
    for name in OFFLINE:
        if not environ.get(name):
            yield f"{name} is not set, so that what is missing would be fetched or compiled in a request"
    for name in package.MODULES:
        yield from _module(name)
    bad = damaged()
    if bad:
        yield f"{len(bad)} files of FlashInfer's GEMM kernels are missing or damaged, such as {bad[0]}"
    yield from _triton(TRITON_MADE)


def _other_versions() -> Iterator[str]:
    """A fault for each package that is not of the version that the backends call, or not of torch's CUDA."""
    found = package.versions()
    yield from package.wrong_versions(found)
    yield from package.wrong_module(package.load())
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is built without CUDA"


def _module(name: str) -> Iterator[str]:
    path = library(name)
    if not path.is_file():
        yield f"FlashInfer's module {name} is not compiled: {path} is not there"
    elif name not in HOST_ONLY and (lacks := ARCHITECTURES - architectures(path)):
        listed = ", ".join(f"sm_{arch}" for arch in sorted(lacks))
        yield f"FlashInfer's module {name} has no code for {listed}"


def _triton(made: Path) -> Iterator[str]:
    """The module that Triton compiles at its first launch, and the source it was made of."""
    spec = find_spec("triton")
    if spec is None or spec.origin is None:
        yield "Triton is not installed, which comes with torch's CUDA builds"
        return
    source = Path(spec.origin).parent / "backends" / "nvidia" / "driver.c"
    if not (made / "driver.so").is_file():
        yield f"Triton's driver module is not compiled: {made / 'driver.so'} is not there"
    elif (made / "driver.c").read_bytes() != source.read_bytes():
        yield f"Triton's driver module was made of another source than {source}"


def _compile(names: Sequence[str]) -> int:
    unknown = [name for name in names if name not in package.MODULES]
    if unknown:
        raise ModuleError(f"there is no module {unknown[0]}; there are {', '.join(package.MODULES)}")
    given = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    if given is None or set(given.split()) != set(ARCHITECTURE_LIST.split()):
        raise ModuleError(f"FLASHINFER_CUDA_ARCH_LIST is {given!r}; {ARCHITECTURE_LIST!r} is needed")
    compile_modules(names or list(package.MODULES))
    return 0


def _check() -> int:
    found = list(faults())
    for fault in found:
        print(f"bake: {fault}", file=sys.stderr)
    if not found:
        print(f"bake: FlashInfer {package.VERSION} and torch {torch.__version__} are complete")
    return 1 if found else 0


def main(arguments: Sequence[str] | None = None) -> int:
    match list(sys.argv[1:] if arguments is None else arguments):
        case ["compile", *names]:
            return _compile(names)
        case ["fetch"]:
            print(f"bake: {fetch()} files of FlashInfer's GEMM kernels are here")
            return 0
        case ["check"]:
            return _check()
        case _:
            print(__doc__, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
