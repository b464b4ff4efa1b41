"""Drawn rows of x."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.accuracy.inputs import EXPONENTS, synthetic


def test_the_same_layer_gets_the_same_rows_and_another_gets_others() -> None:
    """Guards: figures that depend on which layers were measured before."""
    first, again, other = synthetic("a", 8, 256, 0), synthetic("a", 8, 256, 0), synthetic("b", 8, 256, 0)
    assert sorted(first) == ["gaussian", "outliers"]
    for kind, x in first.items():
        assert torch.equal(x.x, again[kind].x)
        assert not torch.equal(x.x, other[kind].x)
        assert not torch.equal(x.x, synthetic("a", 8, 256, 1)[kind].x)


@pytest.mark.parametrize(("k", "count"), [(1, 1), (100, 1), (256, 2), (1024, 8)])
def test_outliers_are_whole_channels(k: int, count: int) -> None:
    """Guards: single large elements, which no model has, and a small K without any."""
    drawn = synthetic("up", 512, k, 3)["outliers"].x
    assert (drawn.shape, drawn.dtype) == ((512, k), torch.bfloat16)
    x = drawn.float()
    sizes = x.square().mean(0).sqrt()
    large = sizes > 2.0 ** (EXPONENTS[0] - 1)
    assert int(large.sum()) == count
    assert (sizes[large] < 2.0 ** (EXPONENTS[1] + 1)).all()
    assert (sizes[~large] < 1.3).all()
