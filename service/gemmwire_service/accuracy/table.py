"""The report as lines of text: a layer each, the verdict last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .inputs import CAPTURED, SYNTHETIC

_KINDS = (*SYNTHETIC, CAPTURED)


def table(document: dict[str, Any]) -> str:
    """`document` is that of report.py."""
    kinds = [kind for kind in _KINDS if any(kind in layer["outputs"] for layer in document["layers"])]
    head = ["layer", "N x K", "SQNR", *(f"{kind} x" for kind in kinds), "flushed", "verdict"]
    rows = [head, *(_row(layer, kinds, document["labels"]) for layer in document["layers"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([*(_line(row, widths) for row in rows), "", *_ending(document)])


def _row(layer: dict[str, Any], kinds: list[str], labels: dict[str, str]) -> list[str]:
    weight, outputs = layer["weight"], layer["outputs"]
    sqnr = weight["sqnr_db"]
    return [
        layer["name"],
        f"{layer['n']} x {layer['k']}",
        "exact" if sqnr is None else f"{float(sqnr):.1f} dB",
        *(_percent(outputs[kind]["row_error"]["median"]) if kind in outputs else "-" for kind in kinds),
        _percent(weight["flushed"]),
        labels[layer["verdict"]],
    ]


def _line(cells: list[str], widths: list[int]) -> str:
    middle = (cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True))
    return "  ".join([cells[0].ljust(widths[0]), *middle, cells[-1]])


def _ending(document: dict[str, Any]) -> Iterator[str]:
    labels, summary = document["labels"], document["summary"]
    count = len(document["layers"])
    yield f"{count} layer{'s' if count != 1 else ''}: " + ", ".join(
        f"{summary[key]} {labels[key]}" for key in labels
    )
    for layer in document["layers"]:
        for reason in layer["reasons"]:
            yield f"{layer['name']}: {reason}"


def _percent(value: float | str) -> str:
    return f"{100 * float(value):.3g} %"
