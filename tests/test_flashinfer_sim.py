"""The simulator of FlashInfer: it refuses what the package refuses, and takes in silence what that takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_sim as sim
import physical
from gemmwire_service.mxfp8.layout import ScaleLayout, shuffle_rows, shuffle_scales, swizzle
from oracle import spread

M, N, K = 3, 128, 256


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> sim.Machine:
    machine = sim.Machine()
    monkeypatch.setattr(sim, "MACHINE", machine)
    return machine


def operands(layout: sim.SfLayout = sim.SfLayout.layout_128x4, m: int = M, k: int = K) -> dict[str, Any]:
    """What trtllm takes: x quantized with its scales in `layout`, a shuffled weight, and where y goes."""
    a, a_descale = sim.mxfp8_quantize(
        spread(m, k, seed=1).bfloat16(), backend="cuda", sf_swizzle_layout=layout
    )
    w, scales = sim.mxfp8_quantize(spread(N, k, seed=2).bfloat16(), is_sf_swizzled_layout=False)
    return {
        "a": a,
        "b": sim.shuffle_matrix_a(w, 128).t(),
        "a_descale": a_descale,
        "b_descale": sim.shuffle_matrix_sf_a(scales.view(N, k // 32), 128),
        "out": torch.empty(m, N, dtype=torch.bfloat16),
        "use_8x4_sf_layout": layout is sim.SfLayout.layout_8x4,
        "backend": "trtllm",
    }


def expected(m: int = M, k: int = K) -> Tensor:
    x = physical.numbers(*physical.quantized(spread(m, k, seed=1).bfloat16().double().numpy()))
    w = physical.numbers(*physical.quantized(spread(N, k, seed=2).bfloat16().double().numpy()))
    return torch.from_numpy(x @ w.T).float().bfloat16()


@pytest.mark.parametrize(
    "layout", [sim.SfLayout.layout_8x4, sim.SfLayout.layout_128x4], ids=lambda layout: layout.name
)
def test_it_multiplies(layout: sim.SfLayout) -> None:
    """Guards: a simulator in whose layouts the service agrees, and the arithmetic does not."""
    call = operands(layout)
    assert sim.mm_mxfp8(**call) is call["out"]
    assert torch.equal(call["out"], expected())


def test_x_can_have_either_layout_over_one_weight() -> None:
    calls = [operands(layout) for layout in (sim.SfLayout.layout_8x4, sim.SfLayout.layout_128x4)]
    assert torch.equal(calls[0]["b_descale"], calls[1]["b_descale"])
    assert torch.equal(sim.mm_mxfp8(**calls[0]), sim.mm_mxfp8(**calls[1]))


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other column of a wider matrix."""
    return tensor.repeat_interleave(2, 1)[:, ::2]


REFUSED = [
    pytest.param(lambda c: {"a": c["a"].float()}, ValueError, "a must be a float8_e4m3fn", id="a-dtype"),
    pytest.param(lambda c: {"a": c["a"][0]}, ValueError, "accepts 2d tensors", id="a-1d"),
    pytest.param(lambda c: {"b": c["b"][:128]}, ValueError, "K dimension mismatch", id="k-mismatch"),
    pytest.param(
        lambda c: {"b": c["b"][:, :64], "b_descale": c["b_descale"][:512]},
        ValueError,
        "n >= 128",
        id="n-below-128",
    ),
    pytest.param(
        lambda c: {"a_descale": c["a_descale"].view(torch.int8)},
        ValueError,
        "must be a uint8",
        id="scale-dtype",
    ),
    pytest.param(
        lambda c: {"a_descale": c["a_descale"][:-1]},
        ValueError,
        "a_descale shape mismatch",
        id="a-scales-short",
    ),
    pytest.param(
        lambda c: {"b_descale": torch.cat([c["b_descale"]] * 2)},
        ValueError,
        "b_descale shape",
        id="b-scales-long",
    ),
    pytest.param(
        lambda c: {"b_descale": c["b_descale"].view(N, -1)}, ValueError, "1D swizzled buffers", id="scales-2d"
    ),
    pytest.param(lambda c: {"use_8x4_sf_layout": True}, ValueError, "a_descale shape", id="told-8x4"),
    pytest.param(lambda c: {"out": c["out"].half()}, ValueError, "Output dtype mismatch", id="out-dtype"),
    pytest.param(
        lambda c: {"out": None, "out_dtype": torch.float16}, ValueError, "Problem size", id="fp16-from-trtllm"
    ),
    pytest.param(lambda c: {"out": c["out"][:2]}, ValueError, "Output shape mismatch", id="out-shape"),
    pytest.param(
        lambda c: {"out": strided(c["out"])}, RuntimeError, "out must be contiguous", id="out-strided"
    ),
    pytest.param(
        lambda c: {"b": c["b"].contiguous()}, RuntimeError, "b must be contiguous", id="b-row-major"
    ),
    pytest.param(
        lambda c: {"backend": "b12x"},
        sim.BackendSupportedError,
        "with capability 100",
        id="another-gpus-backend",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_it_refuses(change: Any, error: type[Exception], message: str) -> None:
    """Guards: a backend that passes here what the package raises for."""
    call = operands()
    with pytest.raises(error, match=message):
        sim.mm_mxfp8(**{**call, **change(call)})


def test_k_has_to_be_a_multiple_of_256_for_trtllm() -> None:
    with pytest.raises(ValueError, match="Problem size is not supported"):
        sim.mm_mxfp8(**operands(k=384))


def test_cute_dsl_takes_8x4_and_reads_128x4() -> None:
    """Guards: a quirk of the package that the simulator would hide by refusing."""
    call = {**operands(sim.SfLayout.layout_8x4, m=9), "backend": "cute-dsl"}
    w, scales = sim.mxfp8_quantize(spread(N, K, seed=2).bfloat16())
    call |= {"b": w.t(), "b_descale": scales}
    assert not torch.equal(sim.mm_mxfp8(**call), expected(m=9))


def test_skip_check_reads_behind_a_short_buffer() -> None:
    """Guards: a promise of safety that the kernel does not give."""
    call = operands(sim.SfLayout.layout_8x4)
    call["a_descale"] = call["a_descale"][:4]
    assert not torch.equal(sim.mm_mxfp8(**{**call, "skip_check": True}), expected())


def test_below_compute_capability_10_the_quantizer_writes_nothing(machine: sim.Machine) -> None:
    machine.capability = 90
    codes, scales = sim.mxfp8_quantize(torch.ones(1, 32, dtype=torch.bfloat16), backend="cuda")
    assert set(codes.view(torch.uint8).flatten().tolist()) == {sim.UNINITIALISED}
    assert set(scales.tolist()) == {sim.UNINITIALISED}


@pytest.mark.parametrize(
    ("x", "error"),
    [
        pytest.param(torch.ones(1, 32), NotImplementedError, id="fp32"),
        pytest.param(torch.ones(1, 33).bfloat16(), AssertionError, id="k33"),
        pytest.param(torch.ones(32).bfloat16(), RuntimeError, id="1d"),
        pytest.param(torch.ones(32, 2).bfloat16().t(), RuntimeError, id="strided"),
    ],
)
def test_the_cuda_quantizer_refuses(x: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        sim.mxfp8_quantize(x, backend="cuda")


@pytest.mark.parametrize("layout", list(sim.SfLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("m", [1, 9, 129])
def test_the_quantizers_scales_are_those_of_the_service(m: int, layout: sim.SfLayout) -> None:
    """Guards: two independent statements of the layouts that differ."""
    x = spread(m, 160, seed=m).bfloat16()
    codes, scales = sim.mxfp8_quantize(x, sf_swizzle_layout=layout)
    linear = sim.mxfp8_quantize(x, is_sf_swizzled_layout=False)[1].view(m, 5)
    name = layout.name.removeprefix("layout_")
    assert torch.equal(scales, swizzle(linear, ScaleLayout(name)))
    assert codes.shape == (m, 160)


@pytest.mark.parametrize("n", [128, 256, 640])
def test_the_shuffles_are_those_of_the_service(n: int) -> None:
    codes, scales = (
        torch.arange(n * 8).view(n, 8).to(torch.uint8),
        torch.arange(n * 5).view(n, 5).to(torch.uint8),
    )
    assert torch.equal(sim.shuffle_matrix_a(codes, 128), shuffle_rows(codes))
    assert torch.equal(sim.shuffle_matrix_sf_a(scales, 128), shuffle_scales(scales))
    out = torch.empty_like(shuffle_scales(scales))
    assert sim.block_scale_interleave(shuffle_rows(scales), out=out) is out
    assert torch.equal(out, shuffle_scales(scales))
