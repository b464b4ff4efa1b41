"""Modules compiled beforehand: where they go, and for which GPUs a compiled one is."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gemmwire_service.backends import flashinfer_modules as modules
from gemmwire_service.backends.flashinfer_modules import ModuleError, architectures, compile_modules, library
from gemmwire_service.backends.flashinfer_package import MODULES, not_compiled

PTX, ELF = 1, 2


def fat_binary(*entries: tuple[int, int, int]) -> bytes:
    """As nvcc embeds it: (kind, architecture, bytes of code) of each entry."""
    packed = b"".join(
        struct.pack("<HHIQIIHHI32x", kind, 0x101, 64, size, 0, 0, 0, 1, arch) + bytes(size)
        for kind, arch, size in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A FlashInfer whose compiler writes the module's name -> its folder data/aot."""
    package = ModuleType("flashinfer")
    package.__path__ = [str(tmp_path / "flashinfer")]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    for name, path in MODULES.items():
        module, _, function = f"flashinfer.{path}".rpartition(".")
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        built = SimpleNamespace(name=name, jit_library_path=tmp_path / f"{name}.so")
        monkeypatch.setattr(sys.modules[module], function, lambda built=built: built, raising=False)

    def build_jit_specs(specs: list[Any], verbose: bool, skip_prebuilt: bool) -> None:
        assert not skip_prebuilt, "what another version left would be taken for new"
        for spec in specs:
            spec.jit_library_path.write_text(spec.name)

    core = ModuleType("flashinfer.jit.core")
    core.build_jit_specs = build_jit_specs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", core)
    return tmp_path / "flashinfer" / "data" / "aot"


def test_what_is_compiled_lies_where_flashinfer_looks(flashinfer: Path) -> None:
    """Guards: an image of minutes of compilation in which FlashInfer finds nothing."""
    assert not_compiled(sys.modules["flashinfer"]) == list(MODULES)
    compile_modules(["trtllm_gemm", "trtllm_utils"])
    assert (flashinfer / "trtllm_gemm" / "trtllm_gemm.so").read_text() == "trtllm_gemm"
    assert library("trtllm_utils") == flashinfer / "trtllm_utils" / "trtllm_utils.so"
    assert not_compiled(sys.modules["flashinfer"]) == ["mxfp8_quantization_sm100", "mxfp8_gemm_cutlass"]


def test_a_module_of_another_name_is_refused(flashinfer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a renamed module, compiled and put where nobody looks."""
    made = SimpleNamespace(name="trtllm_gemm_v2")
    utils = sys.modules["flashinfer.jit.tllm_utils"]
    monkeypatch.setattr(utils, "gen_trtllm_utils_module", lambda: made)
    with pytest.raises(ModuleError, match="makes trtllm_gemm_v2 where the backends here call trtllm_utils"):
        compile_modules(["trtllm_utils"])


def test_a_flashinfer_without_a_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    with pytest.raises(ModuleError, match="no package with a folder"):
        library("trtllm_utils")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        pytest.param(fat_binary((ELF, 100, 40), (ELF, 103, 24)), {100, 103}, id="both"),
        pytest.param(fat_binary((PTX, 100, 40), (ELF, 103, 24)), {103}, id="ptx-is-not-code"),
        pytest.param(fat_binary((ELF, 100, 8)) + bytes(13) + fat_binary((ELF, 103, 8)), {100, 103}, id="two"),
        pytest.param(fat_binary((ELF, 100, 40))[:-1], set(), id="cut-off"),
        pytest.param(struct.pack("<IHHQ", 0xBA55ED50, 9, 16, 80) + bytes(80), set(), id="another-version"),
        pytest.param(struct.pack("<I", 0xBA55ED50), set(), id="the-magic-alone"),
        pytest.param(b"no code at all", set(), id="none"),
    ],
)
def test_the_gpus_of_a_library_are_read_from_it(tmp_path: Path, content: bytes, found: set[int]) -> None:
    path = tmp_path / "module.so"
    path.write_bytes(b"\x7fELF" + bytes(59) + content)
    assert architectures(path) == found


def test_host_code_alone_is_no_module_of_kernels() -> None:
    assert set(modules.HOST_ONLY) < set(MODULES)
