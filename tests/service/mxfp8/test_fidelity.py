"""Sums and counts of a round trip through MXFP8, on blocks whose every rounding is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gemmwire_service.mxfp8.fidelity import SAMPLE, Fidelity
from gemmwire_service.mxfp8.format import quantize
from gemmwire_service.mxfp8.weight import MxWeight

SMALLEST = 2.0**-9  # the E4M3 number above zero


def row(*values: float, k: int = 32) -> Tensor:
    """FP32 [1, k]: these values, then zeros."""
    return torch.tensor([[*values, *[0.0] * (k - len(values))]])


def of(x: Tensor) -> Fidelity:
    weight = MxWeight.from_float(x)
    return Fidelity.of(x, weight.codes, weight.scales)


# 448 makes the scale 2^0, so that each number is rounded as E4M3 alone would.
@pytest.mark.parametrize(
    ("value", "error", "flushed", "subnormal"),
    [
        pytest.param(1.0625, 2.0**-4, 0, 0, id="tie-to-even-below"),
        pytest.param(1.1875, 2.0**-4, 0, 0, id="tie-to-even-above"),
        pytest.param(2.0**-6, 0.0, 0, 0, id="smallest-normal"),
        pytest.param(7 * SMALLEST, 0.0, 0, 1, id="largest-subnormal"),
        pytest.param(-SMALLEST, 0.0, 0, 1, id="smallest-subnormal"),
        pytest.param(7.5 * SMALLEST, SMALLEST / 2, 0, 0, id="tie-that-becomes-normal"),
        pytest.param(SMALLEST / 2, SMALLEST / 2, 1, 0, id="tie-that-becomes-zero"),
        pytest.param(-SMALLEST / 2, SMALLEST / 2, 1, 0, id="becomes-minus-zero"),
        pytest.param(0.75 * SMALLEST, SMALLEST / 4, 0, 1, id="becomes-the-smallest"),
        pytest.param(SMALLEST / 4, SMALLEST / 4, 1, 0, id="flushed"),
        pytest.param(-0.0, 0.0, 0, 0, id="minus-zero-is-a-zero"),
    ],
)
def test_one_number_beside_the_largest(value: float, error: float, flushed: int, subnormal: int) -> None:
    found = of(row(448.0, value))
    zeros = 30 + (value == 0)
    assert found == Fidelity(1, 32, 448.0**2 + value**2, error**2, zeros, 0, flushed, subnormal)


def test_sqnr_is_ten_times_the_logarithm_of_signal_over_noise() -> None:
    """448^2 + 1.0625^2 over 2^-8, by hand: 77.1088... dB."""
    found = of(row(448.0, 1.0625))
    assert found.sqnr_db == pytest.approx(
        10 * (math.log10(200704 + 1.12890625) + 8 * math.log10(2)), rel=1e-15
    )
    assert found.relative_error == pytest.approx(2.0**-4 / math.sqrt(200705.12890625), rel=1e-15)


def test_nothing_saturates_under_the_scale_that_is_rounded_up() -> None:
    """Every FP32 number from 448 to the end of the next scale, at both ends of it: one is never above."""
    bits = torch.cat([torch.tensor(448.0).view(torch.int32) + torch.arange(-4096, 4096),
                      torch.tensor(896.0).view(torch.int32) + torch.arange(-4096, 4096)])  # fmt: skip
    x = torch.zeros(len(bits), 32)
    x[:, 0] = bits.int().view(torch.float32)
    assert of(x).saturated == 0


def test_saturated_is_what_its_scale_cannot_reach() -> None:
    """Guards: counting the code 448, which a number that is 448 times its scale has by right."""
    x = row(224.0, torch.nextafter(torch.tensor(224.0), torch.tensor(300.0)).item(), -300.0, 100.0)
    codes = row(448.0, 448.0, -448.0, 192.0).to(torch.float8_e4m3fn)
    found = Fidelity.of(x, codes, torch.tensor([[126]], dtype=torch.uint8))
    assert found.saturated == 2
    assert found.noise == pytest.approx(76.0**2 + 4.0**2, rel=1e-12)


def test_a_block_too_small_for_any_scale_is_flushed_whole() -> None:
    """Scale byte 0: codes of zero for all of it, and no division by what it stands for."""
    x = torch.full((1, 32), 1e-40)
    found = of(x)
    assert (found.flushed, found.zeros, found.subnormal, found.saturated) == (32, 0, 0, 0)
    assert found.relative_error == 1.0
    assert found.sqnr_db == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_lose_nothing(dtype: torch.dtype) -> None:
    found = of(torch.zeros(3, 40, dtype=dtype))
    assert (found.elements, found.zeros, found.flushed) == (120, 120, 0)
    assert (found.sqnr_db, found.relative_error, found.share(found.zeros)) == (None, 0.0, 1.0)


def test_columns_that_were_added_do_not_count() -> None:
    """Guards: the zeros of a last block that is not whole, in the shares."""
    found = of(torch.full((2, 33), 448.0))
    assert (found.rows, found.elements, found.zeros) == (2, 66, 0)


def test_something_out_of_nothing_is_infinitely_wrong() -> None:
    codes = row(1.0).to(torch.float8_e4m3fn)
    found = Fidelity.of(torch.zeros(1, 32), codes, torch.tensor([[127]], dtype=torch.uint8))
    assert (found.relative_error, found.sqnr_db) == (math.inf, -math.inf)


def test_the_ends_of_fp32_neither_overflow_nor_vanish() -> None:
    x = torch.full((1, 32), 3e38)
    x[0, 0] = 2.9e38
    tiny = x * 2.0**-100 * 2.0**-100
    assert math.isfinite(of(x).signal)
    assert of(tiny).relative_error == of(x).relative_error


def test_parts_add_up() -> None:
    """Guards: a mean of decibels, which is not the decibels of both."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    x[32:] *= 2.0**9
    whole, parts = of(x), Fidelity.total([of(x[:32]), of(x[32:])])
    assert parts.noise == pytest.approx(whole.noise, rel=1e-12)
    assert parts.signal == pytest.approx(whole.signal, rel=1e-12)
    assert (parts.rows, parts.elements, parts.subnormal) == (64, 64 * 96, whole.subnormal)
    assert Fidelity.total([]) == Fidelity()


def test_a_sample_is_all_of_a_small_weight() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    assert Fidelity.sample(x, MxWeight.from_float(x)) == of(x)


def test_a_sample_is_evenly_spaced_rows_with_the_first_and_the_last() -> None:
    n, k = 64, SAMPLE // 4
    x = torch.zeros(n, k)
    chosen = [0, 21, 42, 63]
    x[chosen] = 1.0
    found = Fidelity.sample(x, MxWeight.from_float(x))
    assert (found.rows, found.zeros, found.signal) == (4, 0, 4.0 * k)


def test_a_sample_of_rows_longer_than_it_is_one_row() -> None:
    x = torch.ones(2, SAMPLE + 32, dtype=torch.bfloat16)
    assert Fidelity.sample(x, MxWeight.from_float(x)).rows == 1


def test_any_float_dtype_is_measured_from_its_own_values() -> None:
    """Guards: FP32 that is rounded to BF16 before it is compared."""
    x = row(448.0, 1.0625 + 2.0**-12)
    codes, scales = quantize(x)
    assert Fidelity.of(x, codes, scales).noise == (2.0**-4 - 2.0**-12) ** 2
