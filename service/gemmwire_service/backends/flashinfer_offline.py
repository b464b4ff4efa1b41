"""What FlashInfer would otherwise fetch or make at the first call: its cubins, and the folder it works in."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gemmwire_service.backends.flashinfer_package import FETCH, load

_FETCHED_AT_ONCE = 8


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


def fetch() -> int:
    """Fetch what is not here yet of the TensorRT-LLM GEMM kernels and headers -> how many files there are.

    Every file is held to the checksum in FlashInfer's manifest, and that to the one in the package.
    Errors: OSError for a file that cannot be had.
    """
    load()
    from flashinfer.artifacts import ArtifactPath, CheckSumHash
    from flashinfer.jit.cubin_loader import get_artifact

    part = ArtifactPath.TRTLLM_GEN_GEMM

    def one(name: str, digest: str) -> bytes:
        content = bytes(get_artifact(f"{part}{name}", digest))
        if not content:
            raise OSError(f"{part}{name} cannot be fetched, or is not the file that FlashInfer pins")
        return content

    manifest = _digests(one("checksums.txt", CheckSumHash.TRTLLM_GEN_GEMM).decode())
    with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
        list(pool.map(one, manifest.keys(), manifest.values()))
    return len(manifest)


def damaged() -> list[str]:
    """The files of the TensorRT-LLM GEMM kernels that are missing, or are others than FlashInfer pins."""
    load()
    from flashinfer.artifacts import CheckSumHash

    folder = _gemm_folder()
    if not _is(folder / "checksums.txt", CheckSumHash.TRTLLM_GEN_GEMM):
        return ["checksums.txt"]
    manifest = _digests((folder / "checksums.txt").read_text())
    return [name for name, digest in manifest.items() if not _is(folder / name, digest)]


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _gemm_folder() -> Path:
    load()
    from flashinfer.artifacts import ArtifactPath
    from flashinfer.jit.env import FLASHINFER_CUBIN_DIR

    return Path(FLASHINFER_CUBIN_DIR, ArtifactPath.TRTLLM_GEN_GEMM)


def _listed(checksums: Path) -> list[str]:
    """The files that the manifest beside the kernels names."""
    return list(_digests(checksums.read_text())) if checksums.is_file() else []


def _digests(manifest: str) -> dict[str, str]:
    """SHA-256 by file, of a manifest with one `sha256 name` a line."""
    return {line.split()[1]: line.split()[0] for line in manifest.splitlines() if line.strip()}
