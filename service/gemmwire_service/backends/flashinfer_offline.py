"""What FlashInfer would otherwise fetch or make at the first call: its cubins, and the folder it works in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from gemmwire_service.backends.flashinfer_package import FETCH, load


def workspace(environ: Mapping[str, str] = os.environ) -> Path:
    """Where FlashInfer compiles and keeps a log; it makes the folder when it is imported."""
    base = environ.get("FLASHINFER_WORKSPACE_BASE") or os.path.expanduser("~")
    return Path(base) / ".cache" / "flashinfer"


def cubins(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """(what is here of the TensorRT-LLM GEMM kernels, what is missing), None for nothing."""
    try:
        folder = _gemm_folder()
        listed = _listed(folder / "checksums.txt")
    except Exception as error:  # FlashInfer's import raises anything, and its files may be of another version
        return None, f"cannot be told: {type(error).__name__}: {error}"
    present = sum((folder / name).is_file() for name in listed)
    value = f"{present} of {len(listed)} files in {folder}" if listed else None
    if listed and present == len(listed):
        return value, None
    if environ.get("FLASHINFER_NO_DOWNLOAD"):
        return value, f"FLASHINFER_NO_DOWNLOAD forbids fetching what is missing: {FETCH}, or unset it"
    return value, f"what is missing is fetched from the network at the first call; to have it here, {FETCH}"


def _gemm_folder() -> Path:
    load()
    from flashinfer.artifacts import ArtifactPath
    from flashinfer.jit.env import FLASHINFER_CUBIN_DIR

    return Path(FLASHINFER_CUBIN_DIR, ArtifactPath.TRTLLM_GEN_GEMM)


def _listed(checksums: Path) -> list[str]:
    """The files that the manifest beside the kernels names, one `sha256 name` a line."""
    if not checksums.is_file():
        return []
    return [line.split()[1] for line in checksums.read_text().splitlines() if line.strip()]
