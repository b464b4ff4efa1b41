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


MAIL = {"entries": "*i64", "turn": "*i64", "slots": "constexpr", "block": "constexpr"}


@pytest.mark.parametrize("capability", [90, 100, 103])
def test_the_kernels_of_the_mailbox_move_sixteen_bytes_a_thread(capability: int) -> None:
    """Guards: copies to and from the host in pieces of two bytes, which take ten times as long."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gemmwire_service.mail_triton import BLOCK, bring_kernel, send_kernel

    sizes = {"slots": 16, "block": BLOCK}
    aligned = [["tt.divisibility", 16]]
    bring = ASTSource(
        fn=bring_kernel,
        signature={**MAIL, "x": "*bf16", "total": "i32"},
        constexprs=sizes,
        attrs={(2,): aligned, (3,): aligned},
    )
    send = ASTSource(
        fn=send_kernel,
        signature={**MAIL, "done": "*i32", "y": "*bf16", "unit": "constexpr"},
        constexprs={**sizes, "unit": 8},
        attrs={(3,): aligned},
    )
    for source in (bring, send):
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
