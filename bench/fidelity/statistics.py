"""The figures: perplexity and its standard error, rank correlations, nearest neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def perplexity(nats: Floats) -> float:
    """exp of the mean; nats: the negative log-likelihood of each token."""
    return float(np.exp(nats.mean()))


def standard_error(values: Floats, groups: Integers) -> float:
    """Of the mean of `values`, where those of one group are not independent of each other.

    The root of the sum over groups of (the sum of a group's deviations from the mean)^2, over the number of
    values: the cluster-robust estimate (Liang and Zeger, 1986). With a value a group it is the deviation over
    the root of the number.
    """
    sums = np.bincount(groups, weights=values - values.mean())
    return float(np.sqrt((sums**2).sum()) / len(values))


def divergence(reference: Floats, other: Floats) -> Floats:
    """Kullback-Leibler, nats, of each row: log-probabilities [tokens, words] of both."""
    result: Floats = (np.exp(reference) * (reference - other)).sum(-1)
    return result


def entropy(log_probs: Floats) -> Floats:
    """Nats, of each row: how unsure the model is."""
    result: Floats = -(np.exp(log_probs) * log_probs).sum(-1)
    return result


def ranks(values: Floats) -> Floats:
    """From 1, smallest first; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: Floats = (last - (counts - 1) / 2)[places]
    return result


def spearman(a: Floats, b: Floats) -> float:
    """The correlation of the ranks."""
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def kendall(a: Floats, b: Floats) -> float:
    """tau-b: pairs in the same order less pairs in another, over the geometric mean of pairs not tied."""
    upper = np.triu_indices(len(a), 1)
    signs = [np.sign(values[:, None] - values[None, :])[upper] for values in (a, b)]
    untied = [np.count_nonzero(sign) for sign in signs]
    return float((signs[0] * signs[1]).sum() / np.sqrt(float(untied[0]) * float(untied[1])))


def nearest(similarity: Floats) -> Integers:
    """For each row of a square matrix the column of its largest value, the diagonal left out."""
    others = similarity.copy()
    np.fill_diagonal(others, -np.inf)
    result: Integers = others.argmax(-1)
    return result


def margins(similarity: Floats) -> Floats:
    """By how much the nearest of each row is nearer than the second."""
    others = similarity.copy()
    np.fill_diagonal(others, -np.inf)
    best = np.sort(others, axis=-1)
    result: Floats = best[:, -1] - best[:, -2]
    return result


def log_softmax(logits: NDArray[Any]) -> Floats:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
