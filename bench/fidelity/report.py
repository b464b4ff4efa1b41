"""The figures as docs/accuracy.md shows them: JSON, tables between two marks, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures.page import as_json, replaced, table

from fidelity.chart import chart
from fidelity.language import CORPUS
from fidelity.precisions import PRECISIONS, REFERENCE

PAGE, JSON, CHART = "accuracy.md", "accuracy.json", "accuracy.svg"
TITLES = {precision.name: precision.title for precision in PRECISIONS}
Row = dict[str, Any]


def tables(found: dict[str, Any]) -> str:
    """Everything between the marks."""
    machine = found["machine"]
    parts = [_language(found["language"])]
    if found["embedding"]:
        parts += [_embedding(found["embedding"]), _ranking(found["embedding"])]
    parts.append(f"({machine['processor']}, torch {machine['torch']}, backend `{machine['backend']}`.)")
    return "\n\n".join(parts)


def _language(rows: Sequence[Row]) -> str:
    head = (
        "text",
        "linear layers",
        "perplexity",
        "nats a token over FP32",
        "divergence",
        "entropy over FP32",
        "same first token",
    )
    titles = {text.name: text.title for text in CORPUS}
    return table(
        head,
        [
            (
                f"{titles[row['text']]}, {row['tokens']} tokens" if row["precision"] == REFERENCE else "",
                TITLES[row["precision"]],
                f"{row['perplexity']:.2f} +- {row['perplexity_error']:.2f}",
                _difference(row, f"{row['nats']:+.5f} +- {row['nats_error']:.5f}"),
                _difference(row, f"{row['divergence']:.5f}"),
                _difference(row, f"{row['entropy']:+.4f}"),
                _difference(row, f"{100 * row['same_first']:.1f} %"),
            )
            for row in rows
        ],
    )


def _embedding(rows: Sequence[Row]) -> str:
    head = ("linear layers", "cosine, mean", "least", "relative error, mean", "most", "one element, most")
    return table(
        head,
        [
            (
                TITLES[row["precision"]],
                f"{row['cosine']:.6f}",
                f"{row['cosine_least']:.6f}",
                f"{100 * row['error']:.2f} %",
                f"{100 * row['error_most']:.2f} %",
                f"{row['element_most']:.5f}",
            )
            for row in rows
            if row["precision"] != REFERENCE
        ],
    )


def _ranking(rows: Sequence[Row]) -> str:
    head = (
        "linear layers",
        "similarity, mean change",
        "most",
        "Spearman",
        "Kendall",
        "other nearest",
        "margin",
    )
    return table(
        head,
        [
            (
                TITLES[row["precision"]],
                f"{row['similarity']:.5f}",
                f"{row['similarity_most']:.5f}",
                f"{row['spearman']:.6f}",
                f"{row['kendall']:.5f}",
                f"{row['nearest_changed']} of {row['sentences']}",
                f"{row['changed_margin']:.4f}" if row["nearest_changed"] else "",
            )
            for row in rows
            if row["precision"] != REFERENCE
        ],
    )


def _difference(row: Row, shown: str) -> str:
    return "" if row["precision"] == REFERENCE else shown


def write(found: dict[str, Any], folder: Path) -> None:
    (folder / JSON).write_text(as_json(found))
    (folder / CHART).write_text(chart(found))
    page = folder / PAGE
    page.write_text(replaced(page.read_text(), tables(found)))
