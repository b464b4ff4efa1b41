"""A weight as it is taken in: bytes kept, K padded, everything that is not MXFP8 refused with its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import dequantize, quantize
from gemmwire_service.mxfp8.weight import MxWeight

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def random(n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * 1000 + k)).to(dtype)


def as_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def codes_and_scales(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Every code but NaN, every scale byte but 0xFF, in turn."""
    codes = (torch.arange(n * k) % 127).to(torch.uint8).view(n, k).view(E4M3)
    blocks = (k + 31) // 32
    return codes, (torch.arange(n * blocks) * 7 % 255).to(torch.uint8).view(n, blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_from_float_quantizes_from_its_own_dtype(dtype: torch.dtype) -> None:
    """Guards: FP16 or FP32 weights that take the way through BF16."""
    w = random(5, 64, dtype)
    weight = MxWeight.from_float(w)
    codes, scales = quantize(w)
    assert torch.equal(as_bytes(weight.codes), as_bytes(codes))
    assert torch.equal(weight.scales, scales)
    assert (weight.n, weight.k, weight.k_pad, weight.bias) == (5, 64, 64, None)


@pytest.mark.parametrize(("k", "k_pad"), [(1, 32), (31, 32), (32, 32), (33, 64), (341, 352)])
def test_k_is_padded_with_zeros(k: int, k_pad: int) -> None:
    """Guards: a last block whose scale or values come from beyond the weight."""
    w = random(3, k)
    weight = MxWeight.from_float(w)
    values = dequantize(weight.codes, weight.scales)
    assert (weight.k, weight.k_pad, values.shape) == (k, k_pad, (3, k_pad))
    assert (as_bytes(weight.codes)[:, k:] == 0).all()
    assert torch.equal(values[:, :k].sign(), w.sign())
    last = torch.zeros(3, 32)
    last[:, : k - (k_pad - 32)] = w[:, k_pad - 32 :]
    assert torch.equal(weight.scales[:, -1:], quantize(last)[1])


def test_a_parameter_can_be_a_weight() -> None:
    """Guards: autograd following nn.Linear's tensors into the quantizer."""
    linear = torch.nn.Linear(33, 4)
    weight = MxWeight.from_float(linear.weight, linear.bias)
    assert weight.bias is not None
    assert not weight.bias.requires_grad
    assert torch.equal(weight.bias, linear.bias.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_bias_becomes_fp32(dtype: torch.dtype) -> None:
    """Guards: an FP32 bias that loses bits, and a dtype that the addition would stumble over."""
    bias = random(1, 5, dtype)[0]
    held = MxWeight.from_float(random(5, 32), bias).bias
    assert held is not None
    assert held.dtype == torch.float32
    assert torch.equal(held, bias.float())


@pytest.mark.parametrize("k", [64, 33], ids="k{}".format)
@pytest.mark.parametrize("scale_dtype", [torch.uint8, E8M0], ids=["u8", "e8m0"])
def test_from_mxfp8_keeps_every_byte(scale_dtype: torch.dtype, k: int) -> None:
    """Guards: exponents converted as numbers (2^20 to 255) and codes quantized a second time."""
    codes, scales = codes_and_scales(96, k)
    weight = MxWeight.from_mxfp8(codes, scales.view(scale_dtype), torch.arange(96.0))
    assert torch.equal(as_bytes(weight.codes)[:, :k], as_bytes(codes))
    assert (as_bytes(weight.codes)[:, k:] == 0).all()
    assert weight.scales.dtype == torch.uint8
    assert torch.equal(weight.scales, scales)
    assert weight.k == k


def with_byte(tensor: Tensor, row: int, column: int, byte: int) -> Tensor:
    changed = tensor.view(torch.uint8).clone()
    changed[row, column] = byte
    return changed.view(tensor.dtype)


@pytest.mark.parametrize("byte", [0x7F, 0xFF], ids=hex)
def test_a_nan_code_is_refused_with_its_place(byte: int) -> None:
    """Guards: either NaN of E4M3 taken as a weight."""
    codes, scales = codes_and_scales(4, 64)
    with pytest.raises(CheckpointError, match=rf"codes\[2, 63\] is {byte:#x}, which is the NaN of E4M3"):
        MxWeight.from_mxfp8(with_byte(codes, 2, 63, byte), scales)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_is_seen_at_the_end_of_a_large_weight(code: int) -> None:
    """Guards: a look at the first piece alone; the codes are looked at in pieces."""
    codes, scales = codes_and_scales(1025, 512)
    as_bytes(codes)[1024, 511] = code
    with pytest.raises(CheckpointError, match=rf"codes\[1024, 511\] is {code:#04x}"):
        MxWeight.from_mxfp8(codes, scales)


@pytest.mark.parametrize("scale_dtype", [torch.uint8, E8M0], ids=["u8", "e8m0"])
def test_a_nan_scale_is_refused_with_its_place(scale_dtype: torch.dtype) -> None:
    """Guards: 0xFF read as 2^128."""
    codes, scales = codes_and_scales(4, 64)
    with pytest.raises(CheckpointError, match=r"scales\[3, 1\] is 0xff, which is the NaN of E8M0"):
        MxWeight.from_mxfp8(codes, with_byte(scales, 3, 1, 0xFF).view(scale_dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_weight_or_bias_that_is_not_finite_is_refused(dtype: torch.dtype, value: float) -> None:
    """Guards: the quantizer turning NaN and Inf into 448 unseen."""
    w = random(3, 32, dtype)
    w[1, 30] = value
    with pytest.raises(CheckpointError, match=r"weight\[1, 30\] is -?(nan|inf), which is not finite"):
        MxWeight.from_float(w)
    with pytest.raises(CheckpointError, match=r"bias\[30\] is -?(nan|inf), which is not finite"):
        MxWeight.from_float(random(32, 32), w[1])


def test_the_whole_range_of_fp16_is_finite() -> None:
    """Guards: a check for Inf that overflows on the largest FP16 of both signs."""
    w = torch.tensor([[65504.0, -65504.0]], dtype=torch.float16)
    assert MxWeight.from_float(w).scales.tolist() == [[135]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, E4M3], ids=str)
def test_other_float_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Guards: integers and quantized bytes served as if they were float weights."""
    with pytest.raises(CheckpointError, match=r"weight is torch.*bfloat16, float16 or float32 is needed"):
        MxWeight.from_float(torch.zeros(2, 32).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_scales_that_are_no_exponents_are_refused(dtype: torch.dtype) -> None:
    """Guards: the float scales of block-FP8 checkpoints read as MXFP8."""
    codes, scales = codes_and_scales(2, 32)
    with pytest.raises(
        CheckpointError, match=r"scales are torch.*E8M0 exponents, as uint8 or float8_e8m0fnu"
    ):
        MxWeight.from_mxfp8(codes, scales.to(dtype))


def test_codes_that_are_not_e4m3_are_refused() -> None:
    """Guards: E5M2, whose bytes would decode to other numbers."""
    codes, scales = codes_and_scales(2, 32)
    with pytest.raises(CheckpointError, match=r"codes are torch.float8_e5m2: float8_e4m3fn is needed"):
        MxWeight.from_mxfp8(codes.view(torch.float8_e5m2), scales)


@pytest.mark.parametrize(
    "shape", [(2, 1), (2, 3), (3, 2), (4,), (128, 4)], ids=["short", "padded", "rows", "flat", "tile"]
)
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    """Guards: padded or swizzled scales, which would be read from the wrong places."""
    codes, _ = codes_and_scales(2, 64)
    with pytest.raises(CheckpointError, match=r"\[2, 2\] is needed"):
        MxWeight.from_mxfp8(codes, torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(32,), (2, 2, 32), (0, 32), (2, 0)], ids=str)
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    """Guards: stacked experts and empty layers that fail somewhere later."""
    with pytest.raises(CheckpointError, match=r"a linear layer's weight is \[n, k\]"):
        MxWeight.from_float(torch.zeros(shape))
    with pytest.raises(CheckpointError, match=r"a linear layer's weight is \[n, k\]"):
        MxWeight.from_mxfp8(torch.zeros(shape).to(E4M3), torch.zeros(1, 1, dtype=torch.uint8))


@pytest.mark.parametrize("bias", [torch.zeros(3), torch.zeros(1, 2), torch.zeros(())], ids=["n", "2d", "0d"])
def test_a_bias_of_another_size_is_refused(bias: Tensor) -> None:
    """Guards: a bias that is broadcast over the outputs."""
    with pytest.raises(CheckpointError, match=r"a weight of 2 rows needs \[2\]"):
        MxWeight.from_float(torch.zeros(2, 32), bias)


def test_a_bias_of_another_dtype_is_refused() -> None:
    """Guards: integer bias of an int8 layer added as it is."""
    with pytest.raises(CheckpointError, match=r"bias is torch\.int32"):
        MxWeight.from_float(torch.zeros(2, 32), torch.zeros(2, dtype=torch.int32))
