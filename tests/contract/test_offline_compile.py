"""The project's own GPU kernels, compiled for the GPUs they are meant for on a machine that has none."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.flashinfer

triton = pytest.importorskip("triton", reason="Triton compiles the kernels; run ./dev test-flashinfer")

SIGNATURE = {
    "x": "*bf16",
    "out": "*bf16",
    "k": "i32",
    "x_stride": "i64",
    "out_stride": "i64",
    "blocks": "constexpr",
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")  # every product here is exact
@pytest.mark.parametrize("capability", [90, 100, 103])
def test_the_fused_quantizer_compiles_and_flushes_nothing(capability: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gemmwire_service.mxfp8.fake_triton import BLOCKS, fake_quantize_kernel

    source = ASTSource(fn=fake_quantize_kernel, signature=SIGNATURE, constexprs={"blocks": BLOCKS})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert f".target sm_{capability}a" in compiled.asm["ptx"]
    assert ".ftz" not in compiled.asm["ptx"], "subnormal numbers would be flushed to zero"
    assert len(compiled.asm["cubin"]) > 1000
