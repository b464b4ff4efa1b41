"""The first value that is not finite, wherever it is."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.checkpoint.float_layer import check_finite
from gemmwire_service.errors import CheckpointError

CHUNK = 1 << 18


@pytest.mark.parametrize("position", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * 100_000 - 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_first_bad_index_is_named(position: int, dtype: torch.dtype) -> None:
    """Guards: the edges of the pieces that a weight is looked at in; row and column made of a position."""
    tensor = torch.zeros(3, 100_000, dtype=dtype)
    tensor.view(-1)[position:] = float("inf")

    row, column = divmod(position, 100_000)
    with pytest.raises(CheckpointError) as error:
        check_finite(tensor, "file: tensor 'm.weight'")
    assert str(error.value).startswith(f"file: tensor 'm.weight': holds inf at [{row}, {column}]; ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_largest_finite_values_pass(dtype: torch.dtype) -> None:
    """Guards: a check by way of a sum or a square, which overflows."""
    limits = torch.finfo(dtype)
    tensor = torch.tensor(
        [[limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, -0.0]], dtype=dtype
    )
    assert check_finite(tensor, "t") is tensor


def test_a_tensor_without_elements_passes() -> None:
    assert check_finite(torch.empty(0, 3), "t").shape == (0, 3)
