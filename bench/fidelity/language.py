"""Perplexity of glassllm, whose linear layers are modules of torch, under each precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from glassllm import GlassLM, Tensor, Tokenizer, load_pretrained, no_grad
from glassllm.autograd import embedding
from torch import nn

from fidelity.precisions import PRECISIONS, REFERENCE
from fidelity.statistics import (
    Floats,
    Integers,
    divergence,
    entropy,
    log_softmax,
    perplexity,
    standard_error,
)
from gemmwire import Client

TEXTS = Path(__file__).with_name("texts")
HEAD = "lm_head"


@dataclass(frozen=True)
class Text:
    name: str
    short: str
    title: str


CORPUS = (
    Text("alice", "Alice", "Alice's Adventures in Wonderland, I (in its training text)"),
    Text("oz", "Wizard of Oz", "The Wonderful Wizard of Oz, I and II (not in it)"),
    Text("opticks", "Opticks", "Newton's Opticks, Query 31 (not in it)"),
)


class HostedWeight(Tensor):
    """Stands where a weight stood: `x @ weight` asks a linear layer. A subclass's __rmatmul__ goes first."""

    def __init__(self, linears: nn.Module, name: str) -> None:
        super().__init__(np.zeros(0, dtype=np.float32))
        self._linears, self._name = linears, name

    def __rmatmul__(self, x: Tensor) -> Tensor:
        linear = self._linears.get_submodule(self._name)
        with torch.no_grad():
            return Tensor(linear(torch.from_numpy(x.data.astype(np.float32, copy=False))).numpy())


class Hosted(GlassLM):
    """A GlassLM whose 29 linear layers, the tied head included, are those of the module `linears`."""

    def __init__(self, local: GlassLM) -> None:
        super().__init__(local.cfg)
        self.linears = nn.Module()
        for name, parameter in local.named_parameters().items():
            weight = name.rpartition(".")[2].startswith("W")
            _put(self, name, self._host(name, parameter.data.T) if weight else parameter)
        self.head = self._host(HEAD, local.E.data)

    def _host(self, name: str, weight: Any) -> HostedWeight:
        """weight: [N, K]"""
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = torch.from_numpy(np.ascontiguousarray(weight))
        *path, last = name.split(".")
        parent = self.linears
        for part in path:
            if part not in dict(parent.named_children()):
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, linear)
        return HostedWeight(self.linears, name)

    def forward(self, ids: Any, trace: Any = None, cache: Any = None, start: int = 0) -> Tensor:
        x = embedding(self.E, np.atleast_2d(np.asarray(ids, dtype=np.int64)))
        for i, block in enumerate(self.blocks):
            x = block(x, i, None, None if cache is None else cache[i], start)
        return self.norm_f(x) @ self.head


def _put(model: object, name: str, value: object) -> None:
    *path, last = name.split(".")
    for part in path:
        model = model[int(part)] if isinstance(model, list) else getattr(model, part)
    setattr(model, last, value)


@dataclass(frozen=True)
class Scores:
    """log_probs [tokens, words] of what follows, the token that does, and the window that it is in."""

    log_probs: Floats
    targets: Integers
    windows: Integers

    @property
    def nats(self) -> Floats:
        result: Floats = -self.log_probs[np.arange(len(self.targets)), self.targets]
        return result


def score(model: GlassLM, ids: Sequence[int]) -> Scores:
    """Of each token but the first, given those before it in its window, as long as the model takes."""
    length = model.cfg.max_len
    found, targets, windows = [], [], []
    for window, start in enumerate(range(0, len(ids) - 1, length)):
        part = np.asarray(ids[start : start + length + 1], dtype=np.int64)
        with no_grad():
            found.append(log_softmax(model.forward(part[:-1]).data[0]))
        targets.append(part[1:])
        windows.append(np.full(len(part) - 1, window, dtype=np.int64))
    return Scores(np.concatenate(found), np.concatenate(targets), np.concatenate(windows))


def figures(scores: Scores, reference: Scores) -> dict[str, float]:
    """Differences are to the reference's, token by token: what both texts share cancels."""
    nats, difference = scores.nats, scores.nats - reference.nats
    own = perplexity(nats)
    return {
        "perplexity": own,
        "perplexity_error": own * standard_error(nats, scores.windows),
        "nats": float(difference.mean()),
        "nats_error": standard_error(difference, scores.windows),
        "divergence": float(divergence(reference.log_probs, scores.log_probs).mean()),
        "entropy": float((entropy(scores.log_probs) - entropy(reference.log_probs)).mean()),
        "same_first": float((scores.log_probs.argmax(-1) == reference.log_probs.argmax(-1)).mean()),
    }


def measure(
    client: Client, served: str, tokens: int | None = None, texts: Sequence[Text] = CORPUS
) -> Iterator[dict[str, Any]]:
    """A row for each text and precision; `tokens` is the most of a text that are taken, None for all."""
    local, tokenizer = load_pretrained("en")
    model = Hosted(local)
    for text in texts:
        ids = encoded(tokenizer, text)[:tokens]
        scores = {}
        for precision in PRECISIONS:
            with precision.apply(model.linears, client, served):
                scores[precision.name] = score(model, ids)
            row = figures(scores[precision.name], scores[REFERENCE])
            yield {"text": text.name, "tokens": len(ids), "precision": precision.name, **row}


def encoded(tokenizer: Tokenizer, text: Text) -> list[int]:
    """Lines as they are, with the quotation marks and dashes of the books that the model was trained on."""
    ids: list[int] = tokenizer.encode(typeset((TEXTS / f"{text.name}.txt").read_text(encoding="utf-8")))
    return ids


def typeset(text: str) -> str:
    """Double quotation marks open and close in turn; single ones are apostrophes, two hyphens a dash."""
    parts = text.replace("'", "\u2019").replace("--", "\u2014").split('"')
    marks = ("\u201c", "\u201d")
    return parts[0] + "".join(marks[place % 2] + part for place, part in enumerate(parts[1:]))
