"""What an image for a GPU is baked with, held to the real FlashInfer: where it looks, what it calls it."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from gemmwire_service.backends.flashinfer_package import MODULES, aot_folder, load

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.skipif(
        find_spec("flashinfer") is None, reason="FlashInfer is not installed: ./dev test-flashinfer"
    ),
]

FETCHES = {"trtllm_gemm"}  # making its specification fetches headers, so that only its source can be read


@pytest.fixture(autouse=True)
def _both_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU to ask, FlashInfer has to be told what to compile for."""
    load()
    from flashinfer.jit.core import current_compilation_context

    monkeypatch.setattr(current_compilation_context, "TARGET_CUDA_ARCHS", {(10, "0a"), (10, "3a")})


def test_it_looks_where_modules_are_put() -> None:
    from flashinfer.jit import env

    assert aot_folder(load()) == env.FLASHINFER_AOT_DIR
    assert env.get_aot_path("trtllm_utils") == env.FLASHINFER_AOT_DIR / "trtllm_utils" / "trtllm_utils.so"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_it_calls_its_modules_what_they_are_put_as(name: str) -> None:
    """Guards: a module that is compiled, for an hour, under a name that FlashInfer does not look for."""
    module, _, function = f"flashinfer.{MODULES[name]}".rpartition(".")
    make = getattr(import_module(module), function)
    if name in FETCHES:
        assert f'"{name}"' in inspect.getsource(make)
        return
    spec = make()
    assert spec.name == name
    targets = {flag.rpartition("=")[2] for flag in spec.extra_cuda_cflags if flag.startswith("-gencode=")}
    assert targets in ({"sm_100a", "sm_103a"}, set())  # none: whatever is asked for


def test_a_module_that_is_there_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a baked module that FlashInfer compiles anew, or refuses because compiling is forbidden."""
    from flashinfer.jit import env
    from flashinfer.jit.tllm_utils import gen_trtllm_utils_module

    spec = gen_trtllm_utils_module()
    assert not spec.is_aot
    monkeypatch.setattr(env, "FLASHINFER_AOT_DIR", tmp_path)
    (tmp_path / "trtllm_utils").mkdir()
    (tmp_path / "trtllm_utils" / "trtllm_utils.so").touch()
    assert spec.is_aot
    assert spec.get_library_path() == tmp_path / "trtllm_utils" / "trtllm_utils.so"


def test_the_kernels_have_a_manifest_whose_checksum_is_pinned() -> None:
    from flashinfer.artifacts import ArtifactPath, CheckSumHash
    from flashinfer.jit.cubin_loader import get_artifact

    assert ArtifactPath.TRTLLM_GEN_GEMM.endswith("/"), "file names are appended to it"
    assert len(CheckSumHash.TRTLLM_GEN_GEMM) == 64
    assert list(inspect.signature(get_artifact).parameters)[:2] == ["file_name", "sha256"]
