"""MiniLM's sentence embeddings under each precision: how far they move, and which sentences change places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from fidelity.precisions import PRECISIONS, REFERENCE
from fidelity.sentences import SENTENCES
from fidelity.statistics import Floats, kendall, margins, nearest, spearman
from gemmwire import Client


def figures(embeddings: Floats, reference: Floats) -> dict[str, float]:
    """Of embeddings [sentences, width] of length one, against those of the reference."""
    moved = np.linalg.norm(embeddings - reference, axis=-1) / np.linalg.norm(reference, axis=-1)
    lengths = np.linalg.norm(embeddings, axis=-1) * np.linalg.norm(reference, axis=-1)
    cosines = (embeddings * reference).sum(-1) / lengths
    return {
        "cosine": float(cosines.mean()),
        "cosine_least": float(cosines.min()),
        "error": float(moved.mean()),
        "error_most": float(moved.max()),
        "element_most": float(np.abs(embeddings - reference).max()),
        **ranking(embeddings @ embeddings.T, reference @ reference.T),
    }


def ranking(similarity: Floats, reference: Floats) -> dict[str, float]:
    """Of two matrices of the similarities between the same sentences: every pair, and each one's nearest."""
    pairs = np.triu_indices(len(reference), 1)
    ours, theirs = similarity[pairs], reference[pairs]
    changed = nearest(similarity) != nearest(reference)
    return {
        "pairs": len(ours),
        "similarity": float(np.abs(ours - theirs).mean()),
        "similarity_most": float(np.abs(ours - theirs).max()),
        "spearman": spearman(ours, theirs),
        "kendall": kendall(ours, theirs),
        "nearest_changed": int(changed.sum()),
        "changed_margin": float(margins(reference)[changed].max(initial=0.0)),
    }


def measure(
    client: Client, served: str, example: ModuleType, folder: Path, sentences: Sequence[str] = SENTENCES
) -> Iterator[dict[str, Any]]:
    """A row for each precision. `example` is examples/embeddings.py; `folder` has the model's weights."""
    model, tokenizer = example.load(folder)
    batch = tokenizer.batch(sentences)
    found = {}
    for precision in PRECISIONS:
        with precision.apply(model, client, served), torch.no_grad():
            found[precision.name] = model(*batch).double().numpy()
        row = figures(found[precision.name], found[REFERENCE])
        yield {"sentences": len(sentences), "precision": precision.name, **row}
