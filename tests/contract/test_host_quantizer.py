"""FlashInfer's own quantizer, compiled and run on the CPU: its bytes and layouts are those of the service.

Its MXFP8 module has a host path beside the kernels (for FP32, linear and 128x4). Compiling both, for sm_100a,
takes nvcc and one to three minutes; the result stays in the environment. Neither a GPU nor its driver nor
cuBLAS is needed: it links to the driver and includes headers of libraries without calling them, so stubs do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import physical
from gemmwire_service.mxfp8.format import dequantize, quantize
from gemmwire_service.mxfp8.layout import ScaleLayout, swizzle, unswizzle

GOLDENS = Path(__file__).parents[1] / "goldens" / "mxfp8_quantize_cuda.npz"

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("flashinfer") is None, reason="FlashInfer is not installed: ./dev test-flashinfer"
    ),
]

CUBLAS_STATUS = (
    *("SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH"),
    *("MAPPING_ERROR", "EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_SUPPORTED", "LICENSE_ERROR"),
)
HEADERS = {
    "cublas_v2.h": "#pragma once\n#include <cmath>\n"
    f"typedef enum {{ {', '.join(f'CUBLAS_STATUS_{name}' for name in CUBLAS_STATUS)} }} cublasStatus_t;\n",
    "cublasLt.h": "",
    "curand_kernel.h": "",
}
PROGRAM = """
import sys
import numpy as np
import torch
from gemmwire_service.backends.flashinfer_package import load

flashinfer = load()
given, answers = np.load(sys.argv[1]), {}
for name, x in given.items():
    for layout in ("linear", "128x4"):
        sf = getattr(flashinfer.SfLayout, f"layout_{layout}")
        codes, scales = flashinfer.mxfp8_quantize(torch.from_numpy(x), backend="cuda", sf_swizzle_layout=sf)
        back = flashinfer.mxfp8_dequantize_host(codes, scales, sf_swizzle_layout=sf)
        found = {"codes": codes, "scales": scales, "back": back}
        answers |= {f"{name} {layout} {what}": tensor for what, tensor in found.items()}
np.savez(sys.argv[2], **answers)
"""


def cuda_home() -> Path:
    """A toolkit with its headers: what is in PATH can be a script that calls the real nvcc."""
    found = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes = [Path(home) for home in named if home] + ([Path(found).resolve().parent.parent] if found else [])
    for home in homes:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            return home
    pytest.skip("no CUDA toolkit (nvcc and its headers) in CUDA_HOME, CUDA_PATH, /usr/local/cuda or PATH")


def environment(folder: Path) -> dict[str, str]:
    """What the compilation needs; `folder` gets the stubs."""
    home = cuda_home()
    for name, text in HEADERS.items():
        if not (home / "include" / name).exists():
            (folder / name).write_text(text)
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-x", "c", os.devnull, "-o", library, "-Wl,-soname,libcuda.so.1"], check=True
    )
    shutil.copy(library, folder / "libcuda.so")
    kept = Path(sys.prefix) if sys.prefix != sys.base_prefix else folder
    return {
        **os.environ,
        "CUDA_HOME": str(home),
        "CPATH": str(folder),
        "LD_LIBRARY_PATH": str(folder),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}",
        "FLASHINFER_CUDA_ARCH_LIST": "10.0a",
        "FLASHINFER_WORKSPACE_BASE": str(kept / "flashinfer"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # ninja
    }


@dataclass(frozen=True)
class Answers:
    given: dict[str, Tensor]
    theirs: dict[str, Tensor]

    def of(self, name: str, layout: ScaleLayout) -> tuple[Tensor, Tensor, Tensor]:
        """codes uint8 [m, k], scales flat, and what they stand for, FP32 [m, k]."""
        codes, scales, back = (
            self.theirs[f"{name} {layout.value} {what}"] for what in ("codes", "scales", "back")
        )
        return codes, scales, back


def inputs() -> dict[str, Tensor]:
    """Finite FP32: every bit pattern of BF16 as amax, any bits of FP32, and a ragged matrix."""
    bits = np.load(GOLDENS)["input_bf16_bits"].view(np.int16)
    blocks = torch.from_numpy(bits).view(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(0)
    any_bits = (
        torch.randint(-(2**31), 2**31, (4096, 64), generator=generator).to(torch.int32).view(torch.float32)
    )
    ragged = torch.ldexp(
        torch.randn(300, 352, generator=generator),
        torch.randint(-40, 40, (300, 11), generator=generator).repeat_interleave(32, 1),
    )
    found = {"bf16": blocks, "fp32": any_bits, "ragged": ragged}
    return {name: x[x.isfinite().all(-1)].contiguous() for name, x in found.items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder, given = tmp_path_factory.mktemp("host"), inputs()
    arrays: dict[str, Any] = {name: x.numpy() for name, x in given.items()}
    np.savez(folder / "given.npz", **arrays)
    command = [sys.executable, "-c", PROGRAM, str(folder / "given.npz"), str(folder / "answers.npz")]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    theirs: Any = np.load(folder / "answers.npz")
    return Answers(given, {name: torch.from_numpy(theirs[name]) for name in theirs.files})


@pytest.mark.parametrize("layout", [ScaleLayout.LINEAR, ScaleLayout.R128C4], ids=lambda layout: layout.value)
@pytest.mark.parametrize("name", ["bf16", "fp32", "ragged"])
def test_its_bytes_are_ours(answers: Answers, name: str, layout: ScaleLayout) -> None:
    """Guards: a scale or a code that is off by one somewhere, and scales in another place."""
    x = answers.given[name]
    assert len(x) > 250
    codes, scales = quantize(x)
    theirs, their_scales, _ = answers.of(name, layout)
    wrong = (codes.view(torch.uint8) != theirs).nonzero()
    assert len(wrong) == 0, f"{len(wrong)} codes differ, first {wrong[0].tolist()}: {x[tuple(wrong[0])]:.9g}"
    assert torch.equal(swizzle(scales, layout), their_scales)


@pytest.mark.parametrize("layout", [ScaleLayout.LINEAR, ScaleLayout.R128C4], ids=lambda layout: layout.value)
@pytest.mark.parametrize("name", ["bf16", "fp32", "ragged"])
def test_what_its_bytes_stand_for_is_ours(answers: Answers, name: str, layout: ScaleLayout) -> None:
    """Guards: scales that are written to and read from the same wrong place."""
    codes, scales, back = answers.of(name, layout)
    m, k = codes.shape
    linear = unswizzle(scales, layout, m, k // 32)
    assert torch.equal(dequantize(codes.view(torch.float8_e4m3fn), linear), back)


@pytest.mark.parametrize("name", ["bf16", "ragged"])
def test_its_bytes_are_the_simulators(answers: Answers, name: str) -> None:
    """Guards: simulated kernels that quantize in another way than the package."""
    codes, scales = physical.quantized(answers.given[name].double().numpy())
    theirs, their_scales, _ = answers.of(name, ScaleLayout.R128C4)
    np.testing.assert_array_equal(codes, theirs.numpy())
    places = physical.tiled_128x4(*scales.shape)
    np.testing.assert_array_equal(scales, physical.scales_at(their_scales.numpy(), places))
