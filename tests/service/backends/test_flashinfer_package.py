"""Can this machine: each thing that can be missing or wrong, and the sentence that says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashinfer_sim
from gemmwire_service.backends import BACKENDS, PRIORITY, select
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.errors import BackendError
from sm100 import CPU, PACKAGES, simulate
from source_tree import ROOT

FLASHINFER = ("flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass", "flashinfer_batch_invariant")
LAYER = LayerSpec("layer", 130, 341, bias=True)

# Who runs on which compute capability, by FlashInfer's own table.
RUNS = {
    (9, 0): set(),
    (10, 0): set(FLASHINFER),
    (10, 3): set(FLASHINFER),
    (10, 7): set(FLASHINFER),
    (11, 0): {"flashinfer_cutlass"},
    (12, 0): {"flashinfer_cutlass"},
    (12, 1): {"flashinfer_cutlass"},
}
CHOSEN = {(8, 0): "emulation", (9, 0): "emulation", (10, 0): PRIORITY[0], (12, 0): "flashinfer_cutlass"}


def reason(name: str = "flashinfer_trtllm") -> str | None:
    return BACKENDS[name]().unavailable(CPU)


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@pytest.mark.parametrize("capability", RUNS, ids=dotted)
def test_who_runs_on_which_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Guards: a list of GPUs of our own, which has what FlashInfer has not."""
    simulate(monkeypatch, capability)
    assert {name for name in FLASHINFER if reason(name) is None} == RUNS[capability]


@pytest.mark.parametrize("capability", CHOSEN, ids=dotted)
def test_who_is_chosen_on_which_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    simulate(monkeypatch, capability)
    assert select(LAYER, CPU).backend.name == CHOSEN[capability]


def test_without_a_gpu_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: seconds of FlashInfer's import on every laptop, and its exceptions."""
    simulate(monkeypatch, capability=None)
    monkeypatch.setattr(package, "load", lambda: pytest.fail("imported"))
    assert reason() == "needs an NVIDIA GPU of compute capability 10.0 or higher, not cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_device_that_torch_does_not_see() -> None:
    cuda = torch.device("cuda")
    assert {BACKENDS[name]().unavailable(cuda) for name in (*FLASHINFER, "cublas")} == {
        f"torch {torch.__version__} sees no CUDA device here"
    }


def test_below_10_the_reason_is_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a user of an H200 who is told to install what would return uninitialised memory."""
    simulate(monkeypatch, (9, 0), packages={})
    monkeypatch.setattr(package, "load", lambda: pytest.fail("imported"))
    for name in FLASHINFER:
        assert reason(name) == (
            "compute capability 9.0: FlashInfer's MXFP8 quantizer is compiled for 10.0 and higher, and "
            "returns uninitialised memory below"
        )
    assert reason("cublas") == "compute capability 9.0: cuBLAS has MXFP8 from 10.0 on"


PACKAGE_FAULTS = [
    pytest.param({"flashinfer-python": None}, r"FlashInfer is not installed: pip install 'gemm", id="none"),
    pytest.param({"flashinfer-python": "0.6.16.post3"}, r"is 0\.6\.16\.post3, .* calls 0\.7\.4", id="older"),
    pytest.param({"flashinfer-python": "0.8.0"}, r"flashinfer-python is 0\.8\.0", id="newer"),
    pytest.param(
        {"flashinfer-cubin": "0.6.13"}, r"flashinfer-cubin is 0\.6\.13 beside .* 0\.7\.4", id="cubin"
    ),
    pytest.param(
        {"flashinfer-jit-cache": "0.7.3+cu130"}, r"flashinfer-jit-cache is 0\.7\.3\+cu130", id="jit-cache"
    ),
    pytest.param({"flashinfer-jit-cache": None}, r"finds no nvcc in CUDA_HOME", id="nothing-to-compile-with"),
]


@pytest.mark.parametrize(("changed", "message"), PACKAGE_FAULTS)
def test_packages_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    """Guards: kernels of another release, which FlashInfer 0.7.4 itself only warns about."""
    found = {name: version for name, version in {**PACKAGES, **changed}.items() if version is not None}
    simulate(monkeypatch, packages=found)
    with pytest.raises(BackendError, match=message):
        select(LAYER, CPU, "flashinfer_trtllm")


def toolkit(home: Path) -> Path:
    """A CUDA toolkit as far as anybody looks -> its header."""
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("#!/bin/sh\n")
        (home / name).chmod(0o755)
    return home / "include" / "cuda_runtime.h"


def test_kernels_can_be_compiled_instead_of_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards: the extra `gpu`, which brings no compiled kernels, refused on a machine with nvcc."""
    simulate(monkeypatch, packages={"flashinfer-python": "0.7.4"})
    headers = toolkit(tmp_path / "cuda")
    monkeypatch.setattr(package, "nvcc", lambda: str(tmp_path / "cuda" / "bin" / "nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert reason() is None
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT forbids compiling" in str(reason())
    monkeypatch.delenv("FLASHINFER_DISABLE_JIT")
    headers.unlink()
    assert "finds no headers there: set CUDA_HOME" in str(reason()), "an nvcc that is a link, or a script"


def test_kernels_can_lie_compiled_beside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards: an image with every module baked in that answers by emulation, for want of a compiler."""
    simulate(monkeypatch, packages={"flashinfer-python": "0.7.4"})
    monkeypatch.setattr(flashinfer_sim, "__path__", [str(tmp_path)], raising=False)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    for name in package.MODULES:
        assert "FLASHINFER_DISABLE_JIT forbids compiling" in str(reason()), f"{name} is still missing"
        (tmp_path / "data" / "aot" / name).mkdir(parents=True)
        (tmp_path / "data" / "aot" / name / f"{name}.so").touch()
    assert reason() is None


def test_cubins_can_be_fetched_instead_of_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a first request that fails because it is not allowed to download."""
    without = {name: version for name, version in PACKAGES.items() if name != "flashinfer-cubin"}
    simulate(monkeypatch, packages=without)
    assert reason() is None
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    assert "FLASHINFER_NO_DOWNLOAD forbids fetching" in str(reason())
    assert reason("flashinfer_cutlass") is None
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", "cubins")
    assert reason() is None


@pytest.mark.parametrize(
    ("cuda", "jit_cache", "message"),
    [
        pytest.param("12.4", "0.7.4+cu124", r"built for CUDA 12\.4, and 12\.8 is the first", id="too-old"),
        pytest.param("13.0", "0.7.4+cu129", r"\+cu129 is compiled for another CUDA .* 13\.0", id="another"),
    ],
)
def test_cuda_versions_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, cuda: str, jit_cache: str, message: str
) -> None:
    simulate(monkeypatch, packages={**PACKAGES, "flashinfer-jit-cache": jit_cache})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(BackendError, match=message):
        select(LAYER, CPU, "flashinfer_trtllm")


@pytest.mark.parametrize(("cuda", "jit_cache"), [("12.9", "0.7.4+cu128"), ("13.2", "0.7.4+cu130")])
def test_minor_cuda_versions_fit(monkeypatch: pytest.MonkeyPatch, cuda: str, jit_cache: str) -> None:
    """Guards: a refusal of what CUDA's minor version compatibility allows."""
    simulate(monkeypatch, packages={**PACKAGES, "flashinfer-jit-cache": jit_cache})
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert reason() is None


@pytest.mark.parametrize("error", [AssertionError("no CUDA"), OSError("libcuda.so"), RuntimeError("cubins")])
def test_an_import_that_fails_in_its_own_way(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Guards: a server that dies of FlashInfer's import: 0.6.x raises AssertionError beside a CPU torch."""
    simulate(monkeypatch)

    def load() -> Any:
        raise error

    monkeypatch.setattr(package, "load", load)
    assert str(reason()).startswith(f"import flashinfer fails: {type(error).__name__}: {error}")
    assert select(LAYER, CPU).backend.name == "cublas"


def test_an_import_that_is_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert str(reason()).startswith("import flashinfer fails: ModuleNotFoundError")


@pytest.mark.parametrize("symbol", package.SYMBOLS)
def test_a_symbol_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, symbol: str) -> None:
    """Guards: an AttributeError in the first forward."""
    simulate(monkeypatch)
    monkeypatch.delattr(flashinfer_sim, symbol)
    assert str(reason()).startswith(f"the installed FlashInfer lacks {symbol}: ")


def test_a_module_that_is_not_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a source tree of another version in front of the installed one."""
    simulate(monkeypatch)
    monkeypatch.setattr(flashinfer_sim, "__version__", "0.6.18")
    assert str(reason()).startswith("the flashinfer that Python imports is 0.6.18, not 0.7.4")


def test_a_kernel_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(flashinfer_sim, "mm_mxfp8", lambda **_: None)
    assert "cannot tell what it supports" in str(reason())


@pytest.mark.parametrize("name", ["flashinfer_cutedsl", "flashinfer_batch_invariant"])
def test_kernels_in_cute_dsl_need_its_compiler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    simulate(monkeypatch, cute_dsl=False)
    assert "nvidia-cutlass-dsl, which compiles it, is not installed" in str(reason(name))
    simulate(monkeypatch, (10, 7), cute_dsl_archs=(100, 103))
    assert "cannot compile for compute capability 10.7" in str(reason(name))
    assert reason("flashinfer_trtllm") is None


def test_a_gpu_without_a_batch_invariant_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the mode's own limit, which the table of mm_mxfp8's backends does not show."""
    simulate(monkeypatch)
    monkeypatch.setattr(flashinfer_sim, "BATCH_INVARIANT", (103,))
    assert "no batch-invariant kernels for compute capability 10.0" in str(
        reason("flashinfer_batch_invariant")
    )


def test_nvcc_is_looked_for_where_flashinfer_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a toolkit that FlashInfer finds and we do not, or the other way round."""
    home = tmp_path / "cuda"
    toolkit(home)
    assert package.nvcc({"CUDA_HOME": str(home)}) == str(home / "bin" / "nvcc")
    assert package.nvcc({"CUDA_PATH": str(home)}) == str(home / "bin" / "nvcc")
    assert package.nvcc({"CUDA_HOME": str(tmp_path)}) is None
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert package.nvcc({}) == str(home / "bin" / "nvcc")


def test_the_version_is_the_one_that_is_pinned() -> None:
    """Guards: an extra that installs what the backends then refuse."""
    assert f'"flashinfer-python=={package.VERSION}"' in (ROOT / "pyproject.toml").read_text()


def test_installed_reads_what_pip_installed() -> None:
    assert package.installed("pytest") == pytest.__version__
    assert package.installed("no-such-distribution") is None
