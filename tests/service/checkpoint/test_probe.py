"""The rows that a layer is tried with, and what the unquantized weight answers to them."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.checkpoint.probe import make_probe, probe_rows
from oracle import spread


@pytest.mark.parametrize("k", [1, 31, 32, 33, 341, 4096])
def test_the_rows_are_exact_bf16_of_any_k(k: int) -> None:
    """Guards: a K that is no multiple of a block; rows that say NaN about a good layer."""
    rows = probe_rows("m", k)
    assert (rows.dtype, rows.shape, rows.is_contiguous()) == (torch.bfloat16, (4, k), True)
    assert rows.isfinite().all()


def test_the_rows_are_these() -> None:
    """Guards: an error that a server states today and cannot repeat tomorrow."""
    rows = probe_rows("lm_head", 33)
    assert rows[0, :4].tolist() == [-0.890625, -0.671875, 0.4375, -0.1953125]
    assert rows[3, 32].item() == -11.875
    assert torch.equal(rows, probe_rows("lm_head", 33))


@pytest.mark.parametrize(("name", "k"), [("a", 64), ("b", 32)], ids=["other-k", "other-name"])
def test_name_and_k_both_choose_the_rows(name: str, k: int) -> None:
    assert not torch.equal(probe_rows(name, k)[:, :32], probe_rows("a", 32))


def test_the_exponents_of_the_blocks_are_spread() -> None:
    """Guards: rows of one magnitude, for which a scale of the neighbouring block does as well."""
    blocks = probe_rows("m", 32 * 256).float().view(4, 256, 32).abs().amax(-1)
    exponents = torch.frexp(blocks)[1]
    assert int(exponents.max() - exponents.min()) >= 22
    changes = (exponents[:, 1:] != exponents[:, :-1]).float().mean()
    assert changes > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 33), (3, 300_000), (5000, 128)], ids=str)
def test_y_is_the_unquantized_layer_in_fp32(n: int, k: int, dtype: torch.dtype) -> None:
    """Guards: rows of W that the walk through a large weight leaves out, and the bias."""
    weight, bias = spread(n, k).clamp(-60000, 60000).to(dtype), spread(1, n, seed=1)[0]
    probe = make_probe("m", weight, bias)

    assert (probe.y.dtype, probe.y.shape) == (torch.float32, (4, n))
    terms = probe.x.double().abs() @ weight.double().abs().T + bias.double().abs()
    expected = probe.x.double() @ weight.double().T + bias.double()
    assert ((probe.y.double() - expected).abs() <= terms * 2.0**-18).all()


def test_y_is_exact_where_fp32_is() -> None:
    """Guards: a product rounded to BF16 on the way. Powers of two and few of them leave nothing to round."""
    weight = torch.zeros(64, 64)
    weight.fill_diagonal_(0.5)
    probe = make_probe("m", weight, None)
    assert torch.equal(probe.y, probe.x.float() / 2)
