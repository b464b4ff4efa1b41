"""The rule: each figure at, above and far above its bounds, and which inputs count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gemmwire_service.accuracy.inputs import CAPTURED, Rows
from gemmwire_service.accuracy.layer import measure
from gemmwire_service.accuracy.output import OutputFigures
from gemmwire_service.accuracy.ranking import Spread
from gemmwire_service.accuracy.source import SourceLayer
from gemmwire_service.accuracy.verdict import (
    FLUSHED,
    LIMITS,
    OUTPUT,
    ROWS,
    ROWS_FROM,
    WEIGHT,
    at_least,
    judge,
)
from gemmwire_service.accuracy.weight import WeightFigures
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight
from source_tree import ROOT

N = ROWS_FROM


@pytest.fixture(scope="module")
def exact() -> tuple[WeightFigures, OutputFigures]:
    weight = torch.ones(N, 32)
    layer = SourceLayer("up", weight, MxWeight.from_float(weight), "F32")
    found = measure(layer, {"gaussian": Rows.whole(torch.ones(1, 32))})
    return found.weight, found.outputs["gaussian"]


def weight_of(figures: WeightFigures, error: float = 0.0, flushed: float = 0.0) -> WeightFigures:
    count = 1_000_000
    fidelity = Fidelity(1, count, 1.0, error**2, flushed=round(flushed * count))
    return replace(figures, fidelity=fidelity)


def output_of(figures: OutputFigures, error: float = 0.0, p99: float = 0.0) -> OutputFigures:
    return replace(figures, row_error=Spread(error, p99, p99))


@pytest.mark.parametrize(
    ("part", "at", "verdict"),
    [
        ("weight", WEIGHT.look * 0.999, "fine"),
        ("weight", WEIGHT.look * 1.001, "look"),
        ("weight", WEIGHT.keep * 1.001, "keep"),
        ("flushed", FLUSHED.look, "fine"),
        ("flushed", FLUSHED.look + 1e-6, "look"),
        ("flushed", FLUSHED.keep + 1e-6, "keep"),
        ("output", OUTPUT.look, "fine"),
        ("output", OUTPUT.look * 1.001, "look"),
        ("output", OUTPUT.keep, "look"),
        ("output", OUTPUT.keep * 1.001, "keep"),
        ("output", float("inf"), "keep"),
        ("rows", ROWS.look, "fine"),
        ("rows", ROWS.look * 1.001, "look"),
        ("rows", ROWS.keep * 1.001, "keep"),
    ],
)
def test_each_figure_has_its_bounds(
    exact: tuple[WeightFigures, OutputFigures], part: str, at: float, verdict: str
) -> None:
    weight, output = exact
    weight = weight_of(weight, at if part == "weight" else 0.0, at if part == "flushed" else 0.0)
    output = output_of(output, at if part == "output" else 0.0, at if part == "rows" else 0.0)
    judged = judge(N, weight, {"gaussian": output})
    assert judged.verdict == verdict
    assert len(judged.reasons) == (verdict != "fine")
    assert all(f"{at:.3g}" in reason for reason in judged.reasons)


def test_one_bad_figure_decides(exact: tuple[WeightFigures, OutputFigures]) -> None:
    """Guards: a mean over the figures."""
    weight, output = exact
    outputs = {"gaussian": output_of(output), "outliers": output_of(output, error=0.2, p99=0.2)}
    judged = judge(N, weight, outputs)
    assert (judged.verdict, len(judged.reasons)) == ("keep", 2)


def test_captured_rows_decide_where_there_are_any(exact: tuple[WeightFigures, OutputFigures]) -> None:
    weight, output = exact
    bad, good = output_of(output, error=0.2), output_of(output)
    assert judge(N, weight, {"outliers": bad, CAPTURED: good}).verdict == "fine"
    assert judge(N, weight, {"outliers": good, CAPTURED: bad}).verdict == "keep"


def test_single_rows_do_not_count_where_there_are_few_outputs(
    exact: tuple[WeightFigures, OutputFigures],
) -> None:
    """Guards: N = 1, where some y is near zero and its error is as large as one likes."""
    weight, output = exact
    outputs = {"gaussian": output_of(output, p99=9.0)}
    assert judge(N - 1, weight, outputs).verdict == "fine"
    assert judge(N, weight, outputs).verdict == "keep"


def test_a_layer_that_ignores_the_outliers_of_its_input_is_to_be_kept() -> None:
    """What MXFP8 cannot do: x of 2^14 in one channel of a block, which the weight does not look at, takes the
    bits from its neighbours, which it does."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(5)).bfloat16() / 64
    x[:, 0] = 2.0**14
    weight = torch.randn(N, 32, generator=torch.Generator().manual_seed(6))
    weight[:, 0] = 0.0
    found = measure(
        SourceLayer("down", weight, MxWeight.from_float(weight), "F32"), {CAPTURED: Rows.whole(x)}
    )
    assert found.judged.verdict == "keep"
    assert found.outputs[CAPTURED].weight_only < 0.04
    assert found.judged.reasons[0].startswith("captured x: output error of the median row of x is ")


def test_verdicts_are_in_order() -> None:
    assert at_least("keep", "look")
    assert at_least("look", "look")
    assert not at_least("fine", "look")
    assert not at_least("look", "keep")


def test_the_page_states_the_rule_that_is_used() -> None:
    """Guards: bounds that were moved here and not there, or the other way round."""
    page = (ROOT / "docs" / "accuracy.md").read_text()
    for limit in LIMITS:
        assert f"| {limit.what} | {100 * limit.look:g} % | {100 * limit.keep:g} % |" in page
