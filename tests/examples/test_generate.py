"""glassllm's model with a RemoteLinear in the place of each of its weights."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gemmwire import Client
from gemmwire.nn import RemoteLinear
from serving import Served
from source_tree import ROOT, script


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("glassllm")
    return script(ROOT / "examples" / "generate.py")


def at(model: Any, name: str) -> Any:
    """What stands at a dotted name, of lists too."""
    for part in name.split("."):
        model = model[int(part)] if isinstance(model, list) else getattr(model, part)
    return model


def test_every_weight_is_a_remote_linear(server: Served, example: ModuleType) -> None:
    """Guards: a weight that stayed, and text that comes from it."""
    local, _ = example.load_pretrained("en")
    with Client(server.url) as client:
        remote = example.RemoteGlassLM(local, client, "demo")
        names = [name for name in local.named_parameters() if name.rpartition(".")[2].startswith("W")]
        linears = [at(remote, name).linear for name in names] + [remote.head.linear]
        assert all(isinstance(linear, RemoteLinear) for linear in linears)
        assert {linear.layer for linear in linears} == {
            layer.name for layer in client.layers() if layer.name.startswith("demo.")
        }


def test_text_and_perplexity_are_the_local_model_s(
    server: Served, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a layer that is another than the one whose weight it replaces: its text is noise, and its
    perplexity a hundred times as high."""
    local, tokenizer = example.load_pretrained("en")
    ids = tokenizer.encode(example.TEXT.read_text(encoding="utf-8"))[:257]
    with Client(server.url) as client:
        remote = example.RemoteGlassLM(local, client, "demo")
        assert example.generate(remote, tokenizer, "Alice was beginning to", 12) > 0
        ours, theirs = example.perplexity(remote, ids), example.perplexity(local, ids)
    assert capsys.readouterr().out.startswith("Alice was beginning to")
    assert np.isclose(ours, theirs, rtol=0.05), (ours, theirs)
