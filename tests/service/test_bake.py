"""The last step of an image for a GPU: whatever can be missing from it or wrong is told, and fails it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gemmwire_service import bake
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.flashinfer_modules import ModuleError
from gemmwire_service.backends.flashinfer_package import MODULES, VERSION, Versions

ENVIRON = dict.fromkeys(bake.OFFLINE, "1")


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A complete image, as far as anybody looks -> its folder."""
    flashinfer = ModuleType("flashinfer")
    flashinfer.__version__ = VERSION  # type: ignore[attr-defined]
    flashinfer.__path__ = [str(tmp_path)]
    for symbol in package.SYMBOLS:
        setattr(flashinfer, symbol, SimpleNamespace(is_backend_supported=True))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(package, "versions", lambda: Versions(VERSION, None, None))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in MODULES:
        (tmp_path / "data" / "aot" / name).mkdir(parents=True)
        (tmp_path / "data" / "aot" / name / f"{name}.so").write_bytes(b"")
    monkeypatch.setattr(bake, "architectures", lambda path: {100, 103})
    monkeypatch.setattr(bake, "damaged", list)
    source = tmp_path / "triton" / "backends" / "nvidia" / "driver.c"
    for folder in (source.parent, tmp_path / "made"):
        folder.mkdir(parents=True)
        (folder / "driver.c").write_text("int x;")
    (tmp_path / "made" / "driver.so").write_bytes(b"")
    spec = SimpleNamespace(origin=str(tmp_path / "triton" / "__init__.py"))
    monkeypatch.setattr(bake, "find_spec", lambda name: spec)
    monkeypatch.setattr(bake, "TRITON_MADE", tmp_path / "made")
    return tmp_path


def test_a_complete_image_has_no_fault(
    image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(bake.faults(ENVIRON)) == []
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    assert bake.main(["check"]) == 0
    assert f"FlashInfer {VERSION} and torch" in capsys.readouterr().out


Break = Callable[[Path, pytest.MonkeyPatch], object]


def set_versions(*found: str | None) -> Break:
    return lambda image, patch: patch.setattr(package, "versions", lambda: Versions(*found))


def set_architectures(*found: int) -> Break:
    return lambda image, patch: patch.setattr(bake, "architectures", lambda path: set(found))


def remove(name: str) -> Break:
    return lambda image, patch: (image / name).unlink()


FAULTS = [
    pytest.param(set_versions("0.7.5", None, None), "flashinfer-python is 0.7.5", id="python"),
    pytest.param(set_versions(VERSION, "0.7.3", None), "flashinfer-cubin is 0.7.3 beside", id="cubin"),
    pytest.param(set_versions(VERSION, None, "0.7.4+cu129"), "compiled for another CUDA", id="jit-cache"),
    pytest.param(
        lambda image, patch: patch.setattr(sys.modules["flashinfer"], "__version__", "0.6.18"),
        "the flashinfer that Python imports is 0.6.18",
        id="module",
    ),
    pytest.param(
        lambda image, patch: patch.setattr(torch.version, "cuda", None), "is built without CUDA", id="torch"
    ),
    pytest.param(remove("data/aot/trtllm_gemm/trtllm_gemm.so"), "module trtllm_gemm is not comp", id="no-so"),
    pytest.param(set_architectures(100), "mxfp8_gemm_cutlass has no code for sm_103", id="one-gpu"),
    pytest.param(set_architectures(90), "has no code for sm_100, sm_103", id="another-gpu"),
    pytest.param(
        lambda image, patch: patch.setattr(bake, "damaged", lambda: ["a.cubin", "b.cubin"]),
        "2 files of FlashInfer's GEMM kernels are missing or damaged, such as a.cubin",
        id="cubins",
    ),
    pytest.param(remove("made/driver.so"), "Triton's driver module is not compiled", id="triton"),
    pytest.param(
        lambda image, patch: (image / "made" / "driver.c").write_text("int y;"),
        "Triton's driver module was made of another source",
        id="another-triton",
    ),
    pytest.param(
        lambda image, patch: patch.setattr(bake, "find_spec", lambda name: None),
        "Triton is not installed",
        id="no-triton",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), FAULTS)
def test_what_is_missing_or_wrong_is_a_fault(
    image: Path, monkeypatch: pytest.MonkeyPatch, spoil: Break, message: str
) -> None:
    """Guards: an image that is pushed, and fails on the one machine that can run it."""
    spoil(image, monkeypatch)
    found = list(bake.faults(ENVIRON))
    assert found
    assert any(message in fault for fault in found), found


@pytest.mark.parametrize("name", bake.OFFLINE)
def test_an_image_that_would_fetch_or_compile_is_a_fault(image: Path, name: str) -> None:
    found = list(bake.faults({**ENVIRON, name: ""}))
    assert [fault for fault in found if fault.startswith(f"{name} is not set")] == found
    assert found


def test_a_module_of_host_code_needs_no_kernels(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: trtllm_gemm, whose kernels are cubins, refused for having none."""
    of = {"trtllm_gemm.so": set[int]()}
    monkeypatch.setattr(bake, "architectures", lambda path: of.get(path.name, {100, 103}))
    assert list(bake.faults(ENVIRON)) == []


def test_a_fault_ends_the_build(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (image / "made" / "driver.so").unlink()
    assert bake.main(["check"]) == 1
    assert "bake: Triton's driver module" in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, "10.0a", "9.0a 10.0a 10.3a"])
def test_modules_for_other_gpus_are_not_compiled(monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    """Guards: an hour of compilation for the GPU of the machine that builds, or for one of the two."""
    monkeypatch.setattr(bake, "compile_modules", lambda names: pytest.fail("compiled"))
    if given is None:
        monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    else:
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", given)
    with pytest.raises(ModuleError, match=r"'10\.0a 10\.3a' is needed"):
        bake.main(["compile"])


def test_what_is_asked_for_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(bake, "compile_modules", asked.append)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.3a 10.0a")
    assert (bake.main(["compile"]), bake.main(["compile", "trtllm_gemm"])) == (0, 0)
    assert asked == [list(MODULES), ["trtllm_gemm"]]
    with pytest.raises(ModuleError, match="there is no module trtllm; there are mxfp8_quantization_sm100"):
        bake.main(["compile", "trtllm"])


def test_a_command_that_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bake.main(["bake"]) == 2
    assert "compile [NAME...]" in capsys.readouterr().err
