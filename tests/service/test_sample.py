"""The rows that backends are tried with: they show what other rows hide, and are the same each time."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.mxfp8.format import quantize
from gemmwire_service.sample import sample_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize(("m", "k", "k_pad"), [(1, 33, 64), (7, 341, 512), (128, 384, 384)], ids=str)
def test_rows_are_of_the_size_asked_and_the_same_each_time(m: int, k: int, k_pad: int) -> None:
    rows = sample_rows(m, k, k_pad, CPU)
    assert (rows.shape, rows.dtype) == ((m, k_pad), torch.bfloat16)
    assert rows.isfinite().all()
    assert rows[:, :k].any(dim=1).all()
    assert not rows[:, k:].any()
    assert torch.equal(rows, sample_rows(m, k, k_pad, CPU))


def test_neighbouring_scales_differ() -> None:
    """Guards: rows for which a scale read from the block or row beside it changes nothing."""
    scales = quantize(sample_rows(128, 1024, 1024, CPU))[1]
    assert (scales[1:] != scales[:-1]).float().mean() > 0.9
    assert (scales[:, 1:] != scales[:, :-1]).float().mean() > 0.9
    assert int(scales.max()) - int(scales.min()) >= 23


def test_no_two_rows_are_alike() -> None:
    """Guards: rows that may be swapped without notice."""
    assert len(torch.unique(sample_rows(300, 384, 384, CPU), dim=0)) == 300
