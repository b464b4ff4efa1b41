"""The figures as an SVG of two panels: nats a token over FP32, and the error of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from fidelity.language import CORPUS
from fidelity.precisions import PRECISIONS, REFERENCE

COLOURS = {"bf16": "#6b7280", "mxfp8_weights": "#60a5fa", "mxfp8": "#1d4ed8", "mxfp8_floor": "#f59e0b"}
WIDTH, LEFT, BAR, GAP, HEAD = 760, 150, 16, 14, 34
FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#111827"'


@dataclass(frozen=True)
class Bar:
    colour: str
    value: float
    error: float
    label: str


@dataclass(frozen=True)
class Group:
    title: str
    bars: tuple[Bar, ...]


def chart(found: dict[str, Any]) -> str:
    compared = [precision for precision in PRECISIONS if precision.name != REFERENCE]
    parts, top = _legend([(COLOURS[each.name], each.title) for each in compared]), HEAD
    panels = [("nats a token over FP32 (lines: two standard errors)", _texts(found["language"]))]
    if found["embedding"]:
        panels.append(("relative error of an embedding, mean (lines: up to the most)", _embeddings(found)))
    for title, groups in panels:
        drawn, top = _panel(title, groups, top)
        parts += drawn
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}">'
    )
    back = f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _texts(rows: Sequence[dict[str, Any]]) -> list[Group]:
    return [
        Group(
            text.title.partition(",")[0],
            tuple(
                Bar(COLOURS[row["precision"]], row["nats"], 2 * row["nats_error"], f"{row['nats']:+.5f}")
                for row in rows
                if row["text"] == text.name and row["precision"] != REFERENCE
            ),
        )
        for text in CORPUS
        if any(row["text"] == text.name for row in rows)
    ]


def _embeddings(found: dict[str, Any]) -> list[Group]:
    bars = tuple(
        Bar(
            COLOURS[row["precision"]],
            row["error"],
            row["error_most"] - row["error"],
            f"{100 * row['error']:.2f} %",
        )
        for row in found["embedding"]
        if row["precision"] != REFERENCE
    )
    return [Group("MiniLM", bars)]


def _panel(title: str, groups: Sequence[Group], top: int) -> tuple[list[str], int]:
    """-> its elements, and where the next begins."""
    bars = [bar for group in groups for bar in group.bars]
    high = max(0.0, *(bar.value + bar.error for bar in bars)) or 1.0
    low = (
        min(0.0, *(bar.value - abs(bar.error) for bar in bars)) if any(bar.value < 0 for bar in bars) else 0.0
    )
    scale = (WIDTH - LEFT - 90) / (high - low)
    zero = LEFT - low * scale
    parts = [f'<text x="{LEFT}" y="{top + 16}" {FONT} font-weight="600">{escape(title)}</text>']
    y, first = top + 26, top + 26
    for group in groups:
        middle = y + len(group.bars) * BAR / 2 + 4
        words = escape(group.title if len(group.title) < 24 else group.title[:22] + "...")
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.1f}" {FONT} text-anchor="end">{words}</text>')
        for bar in group.bars:
            parts += _bar(bar, zero, scale, y)
            y += BAR
        y += GAP
    parts.append(f'<path d="M{zero:.1f} {first - 4}V{y - GAP + 4}" stroke="#111827"/>')
    return parts, y + 8


def _bar(bar: Bar, zero: float, scale: float, y: int) -> list[str]:
    end = zero + bar.value * scale
    reach, middle = bar.error * scale, y + BAR / 2 - 1
    x, width = min(zero, end), max(abs(end - zero), 0.5)
    start = max(end - reach, LEFT) if bar.value >= 0 else end - reach
    return [
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{bar.colour}"/>',
        f'<path d="M{start:.1f} {middle:.1f}H{end + reach:.1f}" stroke="#111827"/>',
        f'<text x="{max(end + reach, zero) + 6:.1f}" y="{y + BAR - 4}" {FONT}>{escape(bar.label)}</text>',
    ]


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    parts, x = [], 12
    for colour, title in entries:
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="20" {FONT}>{escape(title)}</text>')
        x += 32 + 6 * len(title)
    return parts
