"""The figures of bench/fidelity against values worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

pytest.importorskip("glassllm")

from fidelity import embedding, language, statistics


class Always:
    """A language model of three words that gives them 1/2, 1/4 and 1/4, whatever came before."""

    cfg = SimpleNamespace(max_len=2)

    def forward(self, ids: Any) -> Any:
        return SimpleNamespace(data=np.log([[[2.0, 1.0, 1.0]] * len(ids)]))


class Counting(Always):
    """One that expects n + 1 after n, as good as surely."""

    def forward(self, ids: Any) -> Any:
        return SimpleNamespace(data=100.0 * (np.arange(8) == np.asarray(ids)[:, None] + 1)[None])


def test_perplexity_of_a_text_by_hand() -> None:
    """Guards: a mean of probabilities, another base, the first token counted, one between two windows not.

    0 1 2 0 0 1: its last five have 1/4, 1/4, 1/2, 1/2 and 1/4, the product is 2^-8: the fifth root of 2^8.
    """
    scores = language.score(Always(), [0, 1, 2, 0, 0, 1])
    assert_allclose(statistics.perplexity(scores.nats), 2 ** (8 / 5), rtol=1e-12)
    assert scores.windows.tolist() == [0, 0, 1, 1, 2]


def test_each_token_is_scored_by_those_before_it() -> None:
    """Guards: targets off by one: the model then sees what it shall predict, or what lies behind."""
    assert_allclose(statistics.perplexity(language.score(Counting(), range(8)).nats), 1.0, rtol=1e-12)
    assert statistics.perplexity(language.score(Counting(), [3, 3, 3]).nats) > 1e40


def test_figures_of_a_text_against_a_reference() -> None:
    """Guards: a difference of the wrong sign, and a divergence of the wrong direction."""
    even = np.log(np.full((4, 2), 0.5))
    sure = np.log(np.tile([0.75, 0.25], (4, 1)))
    targets, windows = np.array([0, 0, 0, 1]), np.arange(4)
    found = language.figures(language.Scores(sure, targets, windows), language.Scores(even, targets, windows))
    assert_allclose(found["nats"], (3 * np.log(0.5 / 0.75) + np.log(0.5 / 0.25)) / 4)
    assert_allclose(found["divergence"], 0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(0.5 / 0.25))
    assert_allclose(found["entropy"], np.log(4) - 0.75 * np.log(3) - np.log(2))
    assert found["same_first"] == 1.0


def test_standard_error_with_a_value_a_group_is_the_usual_one() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    assert_allclose(statistics.standard_error(values, np.arange(4)), values.std() / 2)


def test_standard_error_is_not_lowered_by_saying_things_twice() -> None:
    """Guards: tokens of one window taken for independent, which makes noise look like a difference."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    twice, groups = np.repeat(values, 2), np.repeat(np.arange(4), 2)
    assert_allclose(statistics.standard_error(twice, groups), values.std() / 2)


def test_ranks_share_ties() -> None:
    assert statistics.ranks(np.array([3.0, 1.0, 3.0, 7.0])).tolist() == [2.5, 1.0, 2.5, 4.0]


def test_rank_correlations_by_hand() -> None:
    """Squares of rank differences 1, 1, 1, 1, 0: 1 - 6 * 4 / (5 * 24). Of 10 pairs 2 are in another order.

    With a tie: of 6 pairs 5 in the same order, one of them tied in the first alone: 5 / sqrt(5 * 6).
    """
    a, b = np.arange(5.0), np.array([1.0, 0.0, 3.0, 2.0, 4.0])
    assert_allclose(statistics.spearman(a, b), 0.8)
    assert_allclose(statistics.kendall(a, b), 0.6)
    assert_allclose(statistics.spearman(a, np.exp(a)), 1.0)
    assert_allclose(statistics.kendall(a, -a), -1.0)
    tied = statistics.kendall(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0, 4.0]))
    assert_allclose(tied, 5 / np.sqrt(30))


def test_nearest_is_another_and_margins_are_to_the_second() -> None:
    """Guards: each sentence nearest to itself."""
    similarity = np.array([[1.0, 0.5, 0.2], [0.5, 1.0, 0.9], [0.2, 0.9, 1.0]])
    assert_array_equal(statistics.nearest(similarity), [1, 2, 1])
    assert_allclose(statistics.margins(similarity), [0.3, 0.4, 0.7])


def test_a_changed_neighbour_is_counted_with_its_margin() -> None:
    """Guards: a ranking that is said to be the same."""
    before = np.array([[1.0, 0.5, 0.45], [0.5, 1.0, 0.9], [0.45, 0.9, 1.0]])
    after = before.copy()
    after[0, 2] = after[2, 0] = 0.55
    found = embedding.ranking(after, before)
    assert (found["pairs"], found["nearest_changed"]) == (3, 1)
    assert_allclose(found["changed_margin"], 0.05)
    assert_allclose(found["similarity_most"], 0.1)
    assert_allclose((found["spearman"], found["kendall"]), (0.5, 1 / 3))
    assert embedding.ranking(before, before)["changed_margin"] == 0.0


def test_errors_of_embeddings_by_hand() -> None:
    """Guards: a cosine alone, which a rotation by 0.1 leaves at 0.995."""
    angle = 0.1
    before = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [0.8, 0.6]])
    after = before.copy()
    after[0] = np.cos(angle), np.sin(angle)
    found = embedding.figures(after, before)
    assert_allclose(found["cosine_least"], np.cos(angle))
    assert_allclose(found["error_most"], 2 * np.sin(angle / 2))
    assert_allclose(found["error"], np.sin(angle / 2) / 2)
    assert_allclose(found["element_most"], np.sin(angle))
