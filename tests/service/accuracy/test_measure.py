"""What is measured of a layer, against numbers by hand and against an implementation of another kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from gemmwire import mxfp8
from gemmwire_service.accuracy import tile
from gemmwire_service.accuracy.inputs import Rows
from gemmwire_service.accuracy.layer import LayerFigures, measure
from gemmwire_service.accuracy.ranking import Spread, worst
from gemmwire_service.accuracy.source import SourceLayer
from gemmwire_service.mxfp8.fidelity import relative_errors
from gemmwire_service.mxfp8.weight import MxWeight


def measured(weight: Tensor, **inputs: Tensor) -> LayerFigures:
    return measure(
        SourceLayer("up", weight, MxWeight.from_float(weight), "F32"),
        {kind: Rows.whole(x) for kind, x in inputs.items()},
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def picks(n: int, k: int) -> Tensor:
    """W [n, k] whose row i is 1 at column i: y is the first n columns of x."""
    return torch.eye(n, k)


# --- the weight ---


def test_kurtosis_by_hand() -> None:
    """0, 0, 0, 1: the mean is 1/4, m2 3/16, m4 21/256, and m4 / m2^2 is 7/3."""
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).repeat(8, 16)
    assert measured(weight, x=torch.ones(1, 64)).weight.kurtosis == pytest.approx(7 / 3, rel=1e-14)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3e38])
def test_a_weight_of_one_number_has_no_kurtosis(value: float) -> None:
    """Guards: 0 / 0, or the ratio of two roundings."""
    found = measured(torch.full((3, 70), value), x=torch.ones(2, 70)).weight
    assert found.kurtosis is None
    assert found.largest == pytest.approx(abs(value), rel=1e-7)
    assert all(math.isfinite(each) for each in (found.channels.worst, found.fidelity.relative_error))


def test_a_weight_of_zeros_is_exact_and_says_so() -> None:
    found = measured(torch.zeros(4, 40), x=torch.ones(3, 40))
    assert (found.weight.zero_rows, found.weight.zero_blocks, found.weight.exponents) == (4, 8, {})
    assert (found.weight.fidelity.sqnr_db, found.weight.worst_blocks, found.weight.worst_channels) == (
        None,
        [],
        [],
    )
    assert (found.outputs["x"].relative_error, found.outputs["x"].zero_rows) == (0.0, 3)
    assert found.judged.verdict == "fine"


def test_exponents_count_the_blocks_of_each_scale() -> None:
    """448 has 2^0, 450 and 896 2^1, 3.5 2^-7; a block of zeros has none."""
    weight = torch.zeros(2, 96)
    weight[0, 5], weight[0, 40], weight[0, 70], weight[1, 31] = 448.0, 450.0, 3.5, 896.0
    found = measured(weight, x=torch.ones(1, 96)).weight
    assert (found.exponents, found.zero_blocks) == ({-7: 1, 0: 1, 1: 2}, 2)


def test_worst_channels_and_blocks_are_named_by_their_place() -> None:
    weight = torch.ones(40, 70)
    weight[7, 64:66] = torch.tensor([448.0, 1.0625])  # in a block of 6
    weight[30, 33] = 1.0625  # and 31 times 1.0, which is exact
    found = measured(weight, x=torch.ones(1, 70)).weight
    assert [row for row, _ in found.worst_channels] == [30, 7]
    first, second = found.worst_blocks
    assert (first.row, first.column) == (30, 32)
    assert first.relative_error == pytest.approx(2.0**-4 / math.sqrt(31 + 1.0625**2), rel=1e-14)
    assert (second.row, second.column, second.exponent) == (7, 64, 0)
    assert second.relative_error == pytest.approx(2.0**-4 / math.sqrt(448**2 + 1.0625**2 + 4), rel=1e-14)


# --- the output ---


def test_errors_of_rows_by_hand() -> None:
    """Where 448 is, 1.0625 becomes 1; the weight loses nothing."""
    x = torch.zeros(3, 64)
    x[0, :2] = torch.tensor([448.0, 1.0625])
    x[2, 0] = 448.0
    found = measured(picks(40, 64), x=x).outputs["x"]
    error = 2.0**-4 / math.sqrt(448**2 + 1.0625**2)
    assert (found.row_error.median, found.row_error.p99) == (0.0, found.row_error.worst)
    assert found.row_error.worst == pytest.approx(error, rel=1e-15)
    assert found.relative_error == pytest.approx(2.0**-4 / math.sqrt(2 * 448**2 + 1.0625**2), rel=1e-15)
    assert (found.worst_rows[0][0], len(found.worst_rows)) == (0, 1)
    assert (found.weight_only, found.zero_rows, found.rows) == (0.0, 1, 3)


def test_x_goes_by_way_of_bf16_as_it_is_served_and_is_compared_as_it_was_given() -> None:
    """1.0625 + 2^-12 is 1.0625 in BF16, a tie that becomes 1; from FP32 it would become 1.125."""
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([448.0, 1.0625 + 2.0**-12])
    found = measured(picks(32, 32), x=x).outputs["x"]
    exact = 1.0625 + 2.0**-12
    assert found.relative_error == pytest.approx((exact - 1) / math.sqrt(448**2 + exact**2), rel=1e-14)


def test_what_the_weight_alone_costs() -> None:
    """x is exact: all of the error is the weight's, and `weight_only` says so."""
    weight = picks(40, 64)
    weight[0, :2] = torch.tensor([448.0, 1.0625])
    x = torch.zeros(1, 64)
    x[0, 1] = 1.0
    found = measured(weight, x=x).outputs["x"]
    assert found.weight_only == found.relative_error > 0


def test_an_answer_of_nothing_that_becomes_something_is_infinitely_wrong() -> None:
    """448 + 1.0625 - 448 - 1 - 0.0625, of which 1.0625 alone is rounded."""
    weight = torch.zeros(1, 64)
    weight[0, :2], weight[0, 32:35] = torch.tensor([448.0, 1.0625]), torch.tensor([-448.0, -1.0, -0.0625])
    found = measured(weight, x=torch.ones(1, 64)).outputs["x"]
    assert found.worst_rows == [(0, math.inf)]
    assert found.relative_error == math.inf


def test_the_bias_is_not_in_it() -> None:
    """Guards: a bias that hides the error of what is quantized: a layer is measured without."""
    assert "bias" not in SourceLayer.__annotations__


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 33), (3, 31), (130, 341)])
def test_any_size_is_measured_as_another_implementation_measures_it(n: int, k: int) -> None:
    """By the client's quantizer, which is NumPy and takes BF16, and float64 matmuls of whole matrices."""
    weight, x = normal(n, k).bfloat16().float(), normal(7, k, seed=1).bfloat16()
    found = measured(weight, x=x)
    rounded_w, rounded_x = through(weight), through(x.float())
    w, rows = weight.double().numpy(), x.double().numpy()
    y, served = rows @ w.T, rounded_x @ rounded_w.T
    assert found.weight.fidelity.relative_error == pytest.approx(ratio(rounded_w - w, w), rel=1e-12)
    assert found.outputs["x"].relative_error == pytest.approx(ratio(served - y, y), rel=1e-9)
    assert found.outputs["x"].weight_only == pytest.approx(ratio(rows @ rounded_w.T - y, y), rel=1e-9)
    errors = np.sort(np.linalg.norm(served - y, axis=1) / np.linalg.norm(y, axis=1))
    expected = [errors[3], errors[6], errors[6]]
    got = found.outputs["x"].row_error
    assert [got.median, got.p99, got.worst] == pytest.approx(expected, rel=1e-9)


def through(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """x after the client's quantizer, in float64, its codes looked up in torch's table of E4M3."""
    padded = np.pad(x.numpy(), ((0, 0), (0, -x.shape[1] % 32)))
    codes, scales = mxfp8.quantize(padded)
    numbers = torch.from_numpy(np.array(codes)).view(torch.float8_e4m3fn).double().numpy()
    powers = np.ldexp(1.0, scales.astype(np.int64) - 127).repeat(32, axis=1)
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (numbers * powers)[:, : x.shape[1]]
    return found


def ratio(wrong: object, right: object) -> float:
    return float(np.linalg.norm(np.asarray(wrong)) / np.linalg.norm(np.asarray(right)))


def test_normally_distributed_operands_cost_what_numerics_says() -> None:
    """docs/numerics.md: 3.8 %, of which either operand is 2.65 %."""
    found = measured(normal(512, 512), x=normal(256, 512, seed=1).bfloat16())
    assert found.outputs["x"].relative_error == pytest.approx(0.0375, abs=0.001)
    assert found.weight.fidelity.relative_error == pytest.approx(0.0265, abs=0.0005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_is_more_than_a_seventeenth_off(dtype: torch.dtype) -> None:
    """docs/accuracy.md: 1.0625 becomes 1, and nothing carries more of its block's sum of squares with it."""
    exponents = torch.randint(-30, 30, (64, 128), generator=torch.Generator().manual_seed(1))
    weight = torch.ldexp(normal(64, 128), exponents).to(dtype)
    worst_of_all = torch.full((64, 128), 1.0625, dtype=dtype)
    worst_of_all[:, ::32] = 2.0**8 + 2.0**4
    for each in (weight, worst_of_all):
        found = measured(each, x=torch.ones(1, 128)).weight
        assert found.worst_blocks[0].relative_error <= 1 / 17 + 1e-12
        assert found.channels.worst <= 1 / 17 + 1e-12
    assert found.fidelity.relative_error == pytest.approx(1 / 17, rel=1e-12)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: figures that depend on where a weight was cut: rows lost or counted twice at an edge."""
    weight, x = normal(37, 100), normal(5, 100, seed=1)
    whole = measured(weight, x=x)
    monkeypatch.setattr(tile, "_ELEMENTS", 300)
    cut = measured(weight, x=x)
    assert cut.weight.worst_blocks == whole.weight.worst_blocks
    assert cut.weight.worst_channels == whole.weight.worst_channels
    assert cut.weight.exponents == whole.weight.exponents
    assert cut.weight.fidelity.subnormal == whole.weight.fidelity.subnormal
    assert cut.weight.kurtosis == pytest.approx(whole.weight.kurtosis, rel=1e-12)
    assert cut.outputs["x"].relative_error == pytest.approx(whole.outputs["x"].relative_error, rel=1e-12)
    assert [row for row, _ in cut.outputs["x"].worst_rows] == [
        row for row, _ in whole.outputs["x"].worst_rows
    ]


# --- many errors in few numbers ---


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (0, 0, 0)), (2, (0, 1, 1)), (100, (49, 98, 99)), (101, (50, 99, 100)), (200, (99, 197, 199))],
)
def test_quantiles_are_the_errors_of_rows(count: int, expected: tuple[int, int, int]) -> None:
    """By nearest rank: the smallest that at least so large a share of the rows is not above."""
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(3)).double()
    assert Spread.of(shuffled, torch.ones(count)) == Spread(*map(float, expected))


def test_rows_of_zeros_hide_no_others() -> None:
    """Guards: padding, or pruned rows of a weight, as the median of what is measured."""
    errors = torch.tensor([0.0, 0.0, 0.0, 0.5, math.inf, 0.0], dtype=torch.float64)
    signal = torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0, 1.0], dtype=torch.float64)
    assert Spread.of(errors, signal) == Spread(0.5, math.inf, math.inf)
    assert Spread.of(errors[:3], signal[:3]) == Spread(0.0, 0.0, 0.0)


def test_a_few_rows_with_a_large_answer_do_not_speak_for_the_others() -> None:
    """Over all rows the error is theirs; the median row's is its own."""
    x = torch.zeros(5, 64)
    x[:4, :2] = torch.tensor([448.0, 1.0625]) / 2.0**10
    x[4, 2] = 2.0**20
    weight = picks(40, 64)
    weight[:, 0] = 0  # what took the bits of 1.0625 is not looked at
    found = measured(weight, x=x).outputs["x"]
    assert found.row_error.median == pytest.approx(1 / 17, rel=1e-12)
    assert found.relative_error < 1e-6


def test_the_worst_are_the_largest_and_the_first_of_equals() -> None:
    errors = torch.tensor([0.0, 2.0, 3.0, 2.0, math.inf], dtype=torch.float64)
    assert worst(errors) == [(4, math.inf), (2, 3.0), (1, 2.0), (3, 2.0)]
    assert len(worst(torch.ones(100, dtype=torch.float64))) == 8


def test_nothing_over_nothing_is_nothing() -> None:
    noise, signal = torch.tensor([[0.0, 4.0, 4.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert relative_errors(noise, signal).tolist() == [0.0, 2.0, math.inf]
