"""The figures as an SVG of panels, one below the other, each with a bar for a precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from figures.svg import FONT, WIDTH, document

from fidelity.language import CORPUS
from fidelity.precisions import PRECISIONS, REFERENCE

COLOURS = {"bf16": "#6b7280", "mxfp8_weights": "#60a5fa", "mxfp8": "#1d4ed8", "mxfp8_floor": "#f59e0b"}
LEFT, RIGHT = 110, 90
BAR, GAP, HEAD = 16, 12, 34
Row = dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """`low` and `high`: the ends of the line that is drawn over it."""

    colour: str
    value: float
    low: float
    high: float
    label: str


@dataclass(frozen=True)
class Panel:
    title: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]


def chart(found: dict[str, Any]) -> str:
    parts, top = _legend(), HEAD
    for panel in _panels(found):
        drawn, top = _drawn(panel, top)
        parts += drawn
    return document(parts, top)


def _panels(found: dict[str, Any]) -> list[Panel]:
    texts, embeddings = found["language"], found["embedding"]
    return [
        Panel("nats a token over FP32 (lines: two standard errors)", _by_text(texts, _nats)),
        Panel("divergence from FP32, nats a token", _by_text(texts, _divergence)),
        Panel(
            "relative error of embeddings, mean (lines: to the largest)",
            (("MiniLM", _bars(embeddings, _error)),),
        ),
    ]


def _by_text(rows: Sequence[Row], bar: Callable[[Row], Bar]) -> tuple[tuple[str, tuple[Bar, ...]], ...]:
    return tuple(
        (text.short, _bars([row for row in rows if row["text"] == text.name], bar)) for text in CORPUS
    )


def _bars(rows: Sequence[Row], bar: Callable[[Row], Bar]) -> tuple[Bar, ...]:
    return tuple(bar(row) for row in rows if row["precision"] != REFERENCE)


def _nats(row: Row) -> Bar:
    value, reach = row["nats"], 2 * row["nats_error"]
    return Bar(COLOURS[row["precision"]], value, value - reach, value + reach, f"{value:+.5f}")


def _divergence(row: Row) -> Bar:
    value = row["divergence"]
    return Bar(COLOURS[row["precision"]], value, value, value, f"{value:.5f}")


def _error(row: Row) -> Bar:
    value = row["error"]
    return Bar(COLOURS[row["precision"]], value, value, row["error_most"], f"{100 * value:.2f} %")


def _drawn(panel: Panel, top: int) -> tuple[list[str], int]:
    """-> its elements, and where the next begins."""
    bars = [bar for _, group in panel.groups for bar in group]
    low, high = min(0.0, *(bar.low for bar in bars)), max(0.0, *(bar.high for bar in bars))
    scale = (WIDTH - LEFT - RIGHT) / (high - low)
    zero, y = LEFT - low * scale, top + 24
    parts = [f'<text x="{LEFT}" y="{top + 14}" {FONT} font-weight="600">{escape(panel.title)}</text>']
    for title, group in panel.groups:
        middle = y + len(group) * BAR / 2 + 4
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle:.0f}" {FONT} text-anchor="end">{escape(title)}</text>'
        )
        for bar in group:
            parts += _bar(bar, zero, scale, y)
            y += BAR
        y += GAP
    parts.append(f'<path d="M{zero:.1f} {top + 20}V{y - GAP + 2}" stroke="#111827"/>')
    return parts, y + 6


def _bar(bar: Bar, zero: float, scale: float, y: int) -> list[str]:
    end, middle = zero + bar.value * scale, y + BAR / 2 - 1
    low, high = zero + bar.low * scale, zero + bar.high * scale
    left, width = min(zero, end), max(abs(end - zero), 0.5)
    return [
        f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{bar.colour}"/>',
        f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}" stroke="#111827"/>',
        f'<text x="{max(high, zero) + 6:.1f}" y="{y + BAR - 4}" {FONT}>{escape(bar.label)}</text>',
    ]


def _legend() -> list[str]:
    parts, x = [], 12
    for precision in PRECISIONS:
        if precision.name != REFERENCE:
            colour = COLOURS[precision.name]
            parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
            parts.append(f'<text x="{x + 17}" y="20" {FONT}>{escape(precision.title)}</text>')
            x += 36 + 7 * len(precision.title)
    return parts
