"""What FlashInfer would fetch: told from its own manifest, and told where it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from gemmwire_service.backends.flashinfer_offline import cubins, workspace

GEMM = "7b1f/gemm-b738/"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """FlashInfer's cubin folder, empty -> the part of the TensorRT-LLM GEMM kernels."""
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.env", "flashinfer.artifacts"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["flashinfer.jit.env"], "FLASHINFER_CUBIN_DIR", tmp_path, raising=False)
    paths = type("ArtifactPath", (), {"TRTLLM_GEN_GEMM": GEMM})
    monkeypatch.setattr(sys.modules["flashinfer.artifacts"], "ArtifactPath", paths, raising=False)
    (tmp_path / GEMM).mkdir(parents=True)
    return tmp_path / GEMM


def fill(folder: Path, *present: str) -> None:
    (folder / "include").mkdir()
    (folder / "checksums.txt").write_text("ab12 Gemm_a.cubin\ncd34 Gemm_b.cubin\nef56 include/Meta.h\n")
    for name in present:
        (folder / name).write_text("")


def test_all_of_them_lack_nothing(folder: Path) -> None:
    fill(folder, "Gemm_a.cubin", "Gemm_b.cubin", "include/Meta.h")
    assert cubins({}) == (f"3 of 3 files in {folder}", None)


def test_one_that_is_missing_is_fetched_later(folder: Path) -> None:
    """Guards: "present offline" for a folder that lacks the one kernel a layer needs."""
    fill(folder, "Gemm_a.cubin", "include/Meta.h")
    value, lacks = cubins({})
    assert value == f"2 of 3 files in {folder}"
    assert lacks is not None
    assert "fetched from the network at the first call" in lacks


def test_one_that_is_missing_is_an_error_where_nothing_may_be_fetched(folder: Path) -> None:
    fill(folder, "Gemm_a.cubin")
    assert "FLASHINFER_NO_DOWNLOAD forbids" in (cubins({"FLASHINFER_NO_DOWNLOAD": "1"})[1] or "")


def test_without_a_manifest_there_are_none(folder: Path) -> None:
    value, lacks = cubins({})
    assert value is None
    assert lacks is not None


@pytest.mark.parametrize("text", ["one-word\n", "\x00"], ids=["one-word", "zero"])
def test_a_manifest_of_another_form_is_told(folder: Path, text: str) -> None:
    (folder / "checksums.txt").write_text(text)
    assert "cannot be told: IndexError" in (cubins({})[1] or "")


def test_a_flashinfer_that_does_not_import_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a traceback from whatever its import raises."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    value, lacks = cubins({})
    assert value is None
    assert "cannot be told: ModuleNotFoundError" in (lacks or "")


def test_the_workspace_follows_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/someone")
    assert workspace({}) == Path("/someone/.cache/flashinfer")
    assert workspace({"FLASHINFER_WORKSPACE_BASE": "/w"}) == Path("/w/.cache/flashinfer")
