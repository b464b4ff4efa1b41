"""What FlashInfer would fetch: told from its own manifest, and told where it cannot be."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gemmwire_service.backends.flashinfer_offline import cubins, damaged, fetch, workspace

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


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def pinned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files of a release by name, whose manifest the package pins."""
    files = {"Gemm_a.cubin": b"a", "Gemm_b.cubin": b"bb", "include/Meta.h": b"ccc"}
    manifest = "".join(f"{digest(content)} {name}\n" for name, content in files.items()).encode()
    pins = type("CheckSumHash", (), {"TRTLLM_GEN_GEMM": digest(manifest)})
    monkeypatch.setattr(sys.modules["flashinfer.artifacts"], "CheckSumHash", pins, raising=False)
    return {"checksums.txt": manifest, **files}


def write(folder: Path, files: dict[str, bytes]) -> None:
    (folder / "include").mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_files_as_they_are_pinned_are_whole(folder: Path, pinned: dict[str, bytes]) -> None:
    write(folder, pinned)
    assert damaged() == []


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda folder: (folder / "Gemm_b.cubin").unlink(), ["Gemm_b.cubin"], id="missing"),
        pytest.param(
            lambda folder: (folder / "Gemm_a.cubin").write_bytes(b"x"), ["Gemm_a.cubin"], id="other"
        ),
        pytest.param(
            lambda folder: (folder / "checksums.txt").write_text(f"{digest(b'x')} Gemm_a.cubin\n"),
            ["checksums.txt"],
            id="a-manifest-that-fits-damaged-files",
        ),
        pytest.param(lambda folder: (folder / "checksums.txt").unlink(), ["checksums.txt"], id="no-manifest"),
    ],
)
def test_a_file_that_is_another_is_named(
    folder: Path, pinned: dict[str, bytes], spoil: Callable[[Path], object], named: list[str]
) -> None:
    """Guards: an image with half a download, or with kernels of another release, that counts as complete."""
    write(folder, pinned)
    spoil(folder)
    assert damaged() == named


def test_everything_in_the_manifest_is_fetched(
    pinned: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an image without the one kernel that a layer needs."""
    asked: dict[str, str] = {}

    def get_artifact(name: str, sha256: str) -> bytes:
        asked[name] = sha256
        return pinned[name.removeprefix(GEMM)]

    loader = ModuleType("flashinfer.jit.cubin_loader")
    loader.get_artifact = get_artifact  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer.jit.cubin_loader", loader)
    assert fetch() == 3
    assert asked == {GEMM + name: digest(content) for name, content in pinned.items()}
    loader.get_artifact = lambda name, sha256: b""  # type: ignore[attr-defined]
    with pytest.raises(OSError, match=r"checksums\.txt cannot be fetched"):
        fetch()
