"""Text from a language model whose every linear layer is on a gemmwire server.

    ./dev serve                                   # in one terminal
    ./dev python examples/generate.py             # in another

Prints the tokens as they come, tokens/s, and the perplexity of a text file under the remote MXFP8 model
beside that of the same model run here in FP32. The model is glassllm's (extra `demo`), which is written in
NumPy, with a `RemoteLinear` in the place of each weight; the attention, the norms and the sampling stay here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from glassllm import GlassLM, Tensor, Tokenizer, load_pretrained, no_grad
from glassllm.autograd import embedding
from glassllm.nn import KVCache
from numpy.typing import NDArray

import gemmwire
from gemmwire.nn import RemoteLinear

TEXT = Path(__file__).with_name("alice.txt")


class RemoteWeight(Tensor):
    """Stands where a weight stood: `x @ weight` asks the server. A subclass's __rmatmul__ goes first."""

    def __init__(self, client: gemmwire.Client, layer: str) -> None:
        super().__init__(np.zeros(0, dtype=np.float32))
        self.linear = RemoteLinear(client, layer)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return Tensor(self.linear(torch.from_numpy(x.data.astype(np.float32, copy=False))).numpy())


class RemoteGlassLM(GlassLM):
    """A GlassLM with its 29 linear layers, the tied head included, on the server."""

    def __init__(self, local: GlassLM, client: gemmwire.Client, model: str) -> None:
        super().__init__(local.cfg)
        for name, parameter in local.named_parameters().items():
            self._place(name, parameter, client, f"{model}.{name}")
        self.head = RemoteWeight(client, f"{model}.lm_head")

    def _place(self, name: str, parameter: Tensor, client: gemmwire.Client, layer: str) -> None:
        owner: object = self
        *path, last = name.split(".")
        for part in path:
            owner = owner[int(part)] if isinstance(owner, list) else getattr(owner, part)
        setattr(owner, last, RemoteWeight(client, layer) if last.startswith("W") else parameter)

    def forward(
        self, ids: object, trace: object = None, cache: list[KVCache] | None = None, start: int = 0
    ) -> Tensor:
        x = embedding(self.E, np.atleast_2d(np.asarray(ids, dtype=np.int64)))
        for i, block in enumerate(self.blocks):
            x = block(x, i, None, None if cache is None else cache[i], start)
        return self.norm_f(x) @ self.head


def perplexity(model: GlassLM, ids: Sequence[int]) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window."""
    length = model.cfg.max_len
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, length):
        window = np.asarray(ids[start : start + length + 1])
        with no_grad():
            logits = model.forward(window[:-1]).data[0].astype(np.float64)
        total -= _log_softmax(logits)[np.arange(len(window) - 1), window[1:]].sum()
        count += len(window) - 1
    return float(np.exp(total / count))


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def generate(model: GlassLM, tokenizer: Tokenizer, prompt: str, count: int) -> float:
    """Print the greedy continuation; -> tokens per second."""
    print(prompt, end="", flush=True)
    began = time.perf_counter()
    for step in model.generate(tokenizer.encode(prompt), count, greedy=True):
        print(tokenizer.decode([step.token]), end="", flush=True)
    seconds = time.perf_counter() - began
    print()
    return count / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo", help="the name given to the checkpoint with --model")
    parser.add_argument("--prompt", default="Alice was beginning to")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--text", type=Path, default=TEXT, help="text file for the perplexity")
    options = parser.parse_args(arguments)

    local, tokenizer = load_pretrained("en")
    with gemmwire.Client(options.url) as client:
        remote = RemoteGlassLM(local, client, options.model)
        rate = generate(remote, tokenizer, options.prompt, options.tokens)
        ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))
        ours, theirs = perplexity(remote, ids), perplexity(local, ids)
    print(f"\n{options.tokens} tokens, {rate:.1f} tokens/s, every linear layer on {options.url}")
    print(
        f"perplexity of {options.text.name} ({len(ids)} tokens): "
        f"{ours:.3f} remote MXFP8, {theirs:.3f} local FP32"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
