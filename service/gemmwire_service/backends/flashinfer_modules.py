"""FlashInfer's modules, compiled beforehand into the folder where it looks before it compiles one."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gemmwire_service.backends.flashinfer_package import MODULES, aot_folder, load

HOST_ONLY = ("trtllm_gemm",)  # its kernels are the cubins

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
# kind, -, bytes of this header, bytes of the code, -, -, minor, major, architecture
_ENTRY = struct.Struct("<HHIQIIHHI")


class ModuleError(Exception):
    """FlashInfer does not make the module that the backends call; the message says which and why."""


def compile_modules(names: Sequence[str]) -> None:
    """Compile these with nvcc, which takes minutes, for the architectures of FLASHINFER_CUDA_ARCH_LIST.

    Errors: ModuleError for a module that has another name than here, RuntimeError of the compiler.
    """
    load()
    from flashinfer.jit.core import build_jit_specs

    specs = {name: _specification(name) for name in names}
    build_jit_specs(list(specs.values()), verbose=True, skip_prebuilt=False)
    for name, spec in specs.items():
        target = library(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, target)


def library(name: str) -> Path:
    """Where the compiled module lies, or would."""
    folder = aot_folder(load())
    if folder is None:
        raise ModuleError("flashinfer is no package with a folder, so that nothing can lie beside it")
    return folder / name / f"{name}.so"


def architectures(path: Path) -> set[int]:
    """The compute capabilities that a library has machine code for, as 100 for sm_100a.

    Read from the fat binaries that nvcc embeds: each is a header and entries, which are a header and code.
    The layout is that of NVIDIA's fatbinary, which `cuobjdump --list-elf` reads.
    """
    return {arch for kind, arch in _entries(path.read_bytes()) if kind == 2}  # 1 is PTX, 2 machine code


def _specification(name: str) -> Any:
    module, _, function = f"flashinfer.{MODULES[name]}".rpartition(".")
    spec = getattr(import_module(module), function)()
    if spec.name != name:
        raise ModuleError(f"FlashInfer makes {spec.name} where the backends here call {name}")
    return spec


def _entries(content: bytes) -> Iterator[tuple[int, int]]:
    """(kind, architecture) of every entry."""
    at = content.find(_MAGIC)
    while at >= 0 and at + _HEADER.size <= len(content):
        _, version, header, size = _HEADER.unpack_from(content, at)
        end = at + header + size
        if version == 1 and header == _HEADER.size and end <= len(content):
            entry = at + header
            while entry + _ENTRY.size <= end:
                kind, _, own, code, _, _, _, _, arch = _ENTRY.unpack_from(content, entry)
                yield kind, arch
                entry += max(own + code, _ENTRY.size)
        at = content.find(_MAGIC, at + len(_MAGIC))
