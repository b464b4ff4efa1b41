"""What every kernel leaves to its backend: rows that are not finite, and the bias."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.backends.block_scaled import finish, non_finite_rows

BF16_MAX = (2 - 2**-7) * 2.0**127
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("column", [0, 31, 255])
def test_a_row_with_one_bad_element(value: float, column: int) -> None:
    """Guards: a reduction that drops NaN, as maxima do in many places."""
    x = torch.full((3, 256), BF16_MAX, dtype=torch.bfloat16)
    x[1, column] = value
    assert non_finite_rows(x).tolist() == [[False], [True], [False]]


def test_rows_at_the_ends_of_the_range_are_finite() -> None:
    """Guards: a norm that overflows, or one over squares."""
    x = torch.tensor([[BF16_MAX] * 64, [-BF16_MAX] * 64, [2.0**-133] * 64, [0.0] * 64]).bfloat16()
    assert not non_finite_rows(x).any()


@pytest.mark.parametrize(
    ("y", "bias", "sum"),
    [
        # BF16 has 8 bits: its ulp at 1 is 2^-7, and 1 + 2^-8 is a tie that goes to 1.
        pytest.param(1.0, 2.0**-8, 1.0, id="tie"),
        pytest.param(1.0, 2.0**-8 + 2.0**-20, 1 + 2.0**-7, id="bits-beyond-bf16-break-the-tie"),
        pytest.param(-1.0, 1 + 2.0**-23, 2.0**-23, id="all-bits-of-the-bias"),
        pytest.param(BF16_MAX, 2.0**120, INF, id="overflow"),
    ],
)
def test_the_bias_is_added_in_fp32_and_the_sum_rounded_once(y: float, bias: float, sum: float) -> None:
    """Guards: a bias that is rounded to BF16 first."""
    out = torch.full((2, 3), y, dtype=torch.bfloat16)
    finish(out, torch.tensor([0.0, bias, 0.0]), torch.zeros(2, 1, dtype=torch.bool))
    assert out.tolist() == [[y, sum, y]] * 2


def test_a_row_that_is_not_finite_is_nan_whatever_the_kernel_wrote() -> None:
    out = torch.tensor([[1.0, -0.0], [INF, 2.0]]).bfloat16()
    finish(out, None, torch.tensor([[False], [True]]))
    assert out[1].isnan().all()
    assert out[0].tolist() == [1.0, 0.0]
    assert torch.signbit(out[0]).tolist() == [False, True]
