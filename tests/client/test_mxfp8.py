"""The client's quantizers: FlashInfer's bytes, from NumPy arrays and from torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gemmwire import InputError
from gemmwire.mxfp8 import bfloat16_bits, quantize
from gemmwire_service.mxfp8.format import quantize as service_quantize
from oracle import spread

GOLDENS = Path(__file__).parents[1] / "goldens" / "mxfp8_quantize_cuda.npz"
BF16 = np.dtype(ml_dtypes.bfloat16)

Bits = Any  # uint16 [...]


def from_numpy(bits: Bits, **named: Any) -> tuple[Any, Any]:
    codes, scales = quantize(bits.view(BF16), **named)
    assert isinstance(codes, np.ndarray)
    return codes, scales


def from_torch(bits: Bits, **named: Any) -> tuple[Any, Any]:
    codes, scales = quantize(torch.from_numpy(bits).view(torch.bfloat16), **named)
    assert codes.dtype == scales.dtype == torch.uint8
    return codes.numpy(), scales.numpy()


each = pytest.mark.parametrize("of", [from_numpy, from_torch])


@pytest.fixture(scope="module")
def goldens() -> tuple[Bits, Any, Any]:
    with np.load(GOLDENS) as file:
        return file["input_bf16_bits"], file["payload_e4m3"], file["scale_e8m0"]


def assert_bytes(got: tuple[Any, Any], codes: Any, scales: Any, bits: Bits) -> None:
    wrong = (got[0] != codes).any(-1) | (got[1].reshape(-1) != scales.reshape(-1))
    first = int(wrong.argmax())
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {len(bits)} blocks differ, first {first}: x {bits[first].tolist()}, "
        f"codes {got[0][first].tolist()}, not {codes[first].tolist()}, "
        f"scale {got[1].reshape(-1)[first]}, not {scales.reshape(-1)[first]}"
    )


@each
def test_every_golden_block(of: Callable[..., tuple[Any, Any]], goldens: tuple[Bits, Any, Any]) -> None:
    """Guards: any difference from FlashInfer, over every BF16 bit pattern as amax and NaN and Inf blocks."""
    bits, codes, scales = goldens
    assert len(bits) == 70_854
    assert_bytes(of(bits), codes, scales, bits)


@each
def test_every_pair_of_an_element_and_a_largest(of: Callable[..., tuple[Any, Any]]) -> None:
    """Guards: a tie, a subnormal or a sign that is rounded otherwise, beside each kind of largest element."""
    generator = np.random.default_rng(5)
    fields = np.arange(0, 1 << 15, 5, dtype=np.uint16)  # of the largest
    bits = generator.integers(0, 1 << 16, (len(fields), 32), dtype=np.uint16)
    distance = generator.integers(0, 18, bits.shape).astype(np.int32)  # in exponents
    near = (bits & 0x807F) | (np.maximum((fields[:, None] >> 7).astype(np.int32) - distance, 0) << 7)
    bits = near.astype(np.uint16)
    bits[:, 7] = fields
    x = torch.from_numpy(bits).view(torch.bfloat16)
    codes, scales = service_quantize(x)
    assert_bytes(of(bits), codes.view(torch.uint8).numpy(), scales.numpy(), bits)


@each
def test_marked_blocks_are_those_with_a_nan_or_an_infinity(
    of: Callable[..., tuple[Any, Any]], goldens: tuple[Bits, Any, Any]
) -> None:
    """Guards: a NaN that arrives as 448, and one that spoils the block beside it."""
    bits, codes, scales = goldens
    special = ((bits & 0x7FFF) >= 0x7F80).any(-1)
    assert 0 < special.sum() < len(bits)
    expected = np.where(special, 255, scales.reshape(-1))
    assert_bytes(of(bits, marked=True), codes, expected, bits)


@each
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 64), (2, 0, 32), (0,)], ids=str)
def test_shapes(of: Callable[..., tuple[Any, Any]], shape: tuple[int, ...]) -> None:
    bits = np.full(shape, 0x3F80, np.uint16)
    codes, scales = of(bits)
    assert codes.shape == shape
    assert scales.shape == (*shape[:-1], shape[-1] // 32)
    assert (codes == 0x78).all()  # 256
    assert (scales == 119).all()  # 2^-8


@each
@pytest.mark.parametrize("k", [1, 31, 33, 341])
def test_a_ragged_k_is_that_of_zeros_behind_it(of: Callable[..., tuple[Any, Any]], k: int) -> None:
    """Guards: a last block that takes elements of the next row."""
    rows = spread(5, k).to(torch.bfloat16)
    codes, scales = of(rows.view(torch.uint16).numpy())
    padded = torch.nn.functional.pad(rows, (0, -k % 32))
    expected_codes, expected_scales = service_quantize(padded)
    assert np.array_equal(codes, expected_codes.view(torch.uint8).numpy()[:, :k])
    assert np.array_equal(scales, expected_scales.numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_floats_are_rounded_to_bfloat16_first(dtype: type) -> None:
    """Guards: bytes of a number that the server would not have computed from."""
    x: Any = (np.random.default_rng(1).standard_normal((40, 64)) * 3).astype(dtype)
    bits = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
    for got in (quantize(x), quantize(torch.from_numpy(x))):
        assert np.array_equal(np.asarray(got[0]), from_numpy(bits)[0])
        assert np.array_equal(np.asarray(got[1]), from_numpy(bits)[1])


def test_rounding_to_bfloat16_is_to_nearest_even() -> None:
    """Guards: truncation (0.01 becomes 0.0099487), a NaN that rounds to an infinity, ties away from zero."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (upper | lower).astype(np.uint32).view(np.float32)
        expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy()
        got = bfloat16_bits(x)
        nan = np.isnan(x)
        assert np.array_equal(got[~nan], expected[~nan]), hex(lower)
        assert ((got[nan] & 0x7FFF) > 0x7F80).all()
    assert bfloat16_bits(np.array([0.01], np.float32)).view(BF16)[0] == BF16.type(0.0100098)


def test_strides_orders_and_byte_orders_do_not_matter() -> None:
    """Guards: the elements in memory order instead of the array's."""
    x = spread(6, 64).numpy()
    expected = quantize(x)
    wide = np.zeros((6, 128), np.float32)
    wide[:, ::2] = x
    for same in (np.asfortranarray(x), wide[:, ::2], x[::-1][::-1], x.astype(">f4")):
        for got, right in zip(quantize(same), expected, strict=True):
            assert np.array_equal(got, right)
    for got, right in zip(quantize(torch.from_numpy(x).T.contiguous().T), expected, strict=True):
        assert np.array_equal(got.numpy(), right)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        pytest.param([[1.0]], "of type list", id="list"),
        pytest.param(np.ones((2, 32)), "float64", id="float64"),
        pytest.param(np.float32(1), "no dimensions", id="scalar"),
        pytest.param(torch.ones(32, dtype=torch.int8), "torch.int8", id="int8"),
        pytest.param(torch.ones(32, requires_grad=True), "requires grad", id="grad"),
        pytest.param(torch.ones(32, device="meta"), "meta", id="meta"),
        pytest.param(memoryview(bytes(128)).cast("f"), "numpy.asarray", id="buffer"),
        pytest.param(np.ma.masked_array(np.ones(32, np.float32)), "masked", id="masked"),
    ],
)
def test_what_is_not_rows_of_floats_is_refused(x: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        quantize(x)
