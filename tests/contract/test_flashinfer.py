"""The real FlashInfer, on a CPU: what is passed to it exists, and the simulator is like it.

Run by `./dev test-flashinfer`, where FlashInfer is installed; an import that fails there is a failure.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import flashinfer_sim
from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.mxfp8.layout import shuffle_rows, unshuffle_rows
from kernels import KERNELS, exact_layer
from sm100 import simulate

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.skipif(
        find_spec("flashinfer") is None, reason="FlashInfer is not installed: ./dev test-flashinfer"
    ),
]

SIMULATED = (
    "MeasurementPolicy",
    "ReplayCoverage",
    "SfLayout",
    "autotune",
    "autotune_v2",
    "block_scale_interleave",
    "mm_mxfp8",
    "mxfp8_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
)
CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 107, 110, 120, 121)
GEMM_BACKENDS = {
    "flashinfer_trtllm": "trtllm",
    "flashinfer_cutedsl": "cute-dsl",
    "flashinfer_cutlass": "cutlass",
}


@pytest.fixture(scope="module")
def flashinfer() -> Any:
    return package.load()


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def test_it_is_the_version_that_the_backends_call(flashinfer: Any) -> None:
    assert flashinfer.__version__ == package.installed("flashinfer-python") == package.VERSION


@pytest.mark.parametrize("symbol", package.SYMBOLS)
def test_every_symbol_is_there(flashinfer: Any, symbol: str) -> None:
    assert hasattr(flashinfer, symbol)


@pytest.mark.parametrize("name", SIMULATED)
def test_the_simulator_has_the_signature(flashinfer: Any, name: str) -> None:
    """Guards: tests that pass against a function which the package does not have."""
    real = getattr(flashinfer, name)
    if name == "SfLayout":
        assert {member.name: member.value for member in flashinfer_sim.SfLayout} == {
            member.name: member.value for member in real
        }
    else:
        assert parameters(getattr(flashinfer_sim, name)) == parameters(real)


def test_nothing_of_the_simulator_is_left_unchecked() -> None:
    """Guards: a function that is added to the simulator alone."""
    named = {*SIMULATED, *package.SYMBOLS}
    assert set(package.SYMBOLS) <= set(SIMULATED)
    assert {name for name in named if not hasattr(flashinfer_sim, name)} == set()


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("flashinfer")])
def test_every_argument_that_is_passed_exists(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Guards: a TypeError in the first forward on the first SM100 machine."""
    real = {
        function: inspect.signature(getattr(flashinfer, function))
        for function in ("mm_mxfp8", "mxfp8_quantize")
    }
    machine = simulate(monkeypatch)
    layer = exact_layer(BACKENDS[name](), 130, 341, bias=True)
    for m in (9, 300):
        for plan in layer.plans(m):
            layer.forward(torch.ones(m, 341, dtype=torch.bfloat16), plan)
    seen = {function for function, _ in machine.calls}
    assert seen == set(real)
    for function, arguments in machine.calls:
        real[function].bind(**arguments)


@pytest.mark.parametrize("cc", CAPABILITIES)
def test_the_table_of_what_runs_where(flashinfer: Any, cc: int) -> None:
    """Guards: a simulator, and with it the tests of the choice, of another table than the package's."""
    supported = flashinfer.mm_mxfp8.is_backend_supported
    assert {name: supported(name, cc) for name in flashinfer_sim.SUPPORTED} == {
        name: cc in capabilities for name, capabilities in flashinfer_sim.SUPPORTED.items()
    }


def test_the_preferred_backends_run_on_sm100(flashinfer: Any) -> None:
    """Guards: a first choice that no GPU of the family can take."""
    supported = flashinfer.mm_mxfp8.is_backend_supported
    for name, theirs in GEMM_BACKENDS.items():
        assert {cc for cc in (90, 100, 103, 107) if supported(theirs, cc)} == {100, 103, 107}, name
    assert [cc for cc in (110, 120, 121) if supported("cutlass", cc)] == [110, 120, 121]
    assert not any(supported("auto", cc) for cc in CAPABILITIES), "auto is no backend of the table"


def test_the_batch_invariant_mode_runs_where_the_simulator_says(flashinfer: Any) -> None:
    from flashinfer.batch_invariant import BatchInvariantUnsupportedError, fingerprint

    assert issubclass(BatchInvariantUnsupportedError, ValueError)
    for cc in CAPABILITIES:
        question = {"N": 128, "K": 128, "out_dtype": torch.bfloat16, "arch": f"sm_{cc}"}
        if cc in flashinfer_sim.BATCH_INVARIANT:
            assert fingerprint("mm_mxfp8", **question)
        else:
            with pytest.raises(ValueError, match="takes arch as one of"):
                fingerprint("mm_mxfp8", **question)


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (10, 7), (12, 0)], ids=str)
def test_the_real_package_answers_the_machine_question(
    flashinfer: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """Guards: a reason that comes of the question itself, such as a module that has moved."""
    from gemmwire_service.backends import cuda_device

    monkeypatch.setattr(cuda_device, "capability", lambda device: capability)
    monkeypatch.setattr(package, "_no_compiler", lambda flashinfer: iter(()))
    cpu = torch.device("cpu")
    on_sm100 = capability[0] == 10
    for name in (*GEMM_BACKENDS, "flashinfer_batch_invariant"):
        reason = BACKENDS[name]().unavailable(cpu)
        assert (reason is None) == (on_sm100 or name == "flashinfer_cutlass"), reason


def test_the_import_is_quiet_where_warnings_are_errors() -> None:
    """Guards: DeprecationWarnings of nvidia-cutlass-dsl, which make an import under -W error fail."""
    import subprocess
    import sys

    program = "from gemmwire_service.backends.flashinfer_package import load; print(load().__version__)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == (package.VERSION, "")


@pytest.mark.parametrize("k", [1, 32, 384])
@pytest.mark.parametrize("n", [32, 64, 128, 160, 576, 2176])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_its_row_shuffle_is_ours(flashinfer: Any, n: int, k: int, dtype: torch.dtype) -> None:
    """Guards: a permutation that is right for some N."""
    matrix = (torch.arange(n * k) % 251).to(torch.uint8).view(n, k)
    matrix = matrix.view(dtype) if dtype.itemsize == 1 else matrix.to(dtype)
    theirs = flashinfer.shuffle_matrix_a(matrix.view(torch.uint8) if dtype.itemsize == 1 else matrix, 128)
    ours = shuffle_rows(matrix)
    assert torch.equal(ours.view(torch.uint8) if dtype.itemsize == 1 else ours, theirs)
    assert torch.equal(unshuffle_rows(ours).view(torch.uint8), matrix.view(torch.uint8))
    assert torch.equal(
        flashinfer_sim.shuffle_matrix_a(matrix.view(torch.uint8), 128), shuffle_rows(matrix.view(torch.uint8))
    )


def test_its_scale_shuffle_needs_a_gpu(flashinfer: Any) -> None:
    """Guards: our own being kept for a reason that is gone: then the two could be compared here."""
    with pytest.raises(ValueError, match="cuda"):
        flashinfer.shuffle_matrix_sf_a(torch.zeros(128, 4, dtype=torch.uint8), 128)


def test_a_cpu_tensor_reaches_no_kernel(flashinfer: Any) -> None:
    """Guards: checks that the simulator makes and the package does not, in the order of the package."""
    a, b = torch.zeros(1, 256).to(torch.float8_e4m3fn), torch.zeros(128, 256).to(torch.float8_e4m3fn)
    scales = torch.zeros(512 * 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="device must be a cuda device"):
        flashinfer.mm_mxfp8(a=a, b=b.t(), a_descale=scales, b_descale=scales, backend="trtllm")
