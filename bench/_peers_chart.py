"""The figures of bench/peers.py as an SVG: a panel for each shape and number of clients, a bar a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from figures.svg import FONT, document

OURS, OTHER, BARE = "#1d4ed8", "#9ca3af", "#111827"
COLUMN, LEFT, BAR, HEAD = 560, 250, 17, 46
LABEL = 90  # at the end of a bar


@dataclass(frozen=True)
class Bar:
    """`label` is shown at its end; the longest of a panel takes all of its width."""

    title: str
    value: float
    label: str
    colour: str


@dataclass(frozen=True)
class Panel:
    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return HEAD + BAR * len(self.bars)


def chart(rows: Sequence[tuple[Panel, Panel]], note: str) -> str:
    """Two panels beside each other in each row; `note` stands above all."""
    parts = [f'<text x="12" y="20" {FONT}>{escape(note)}</text>']
    top = 28
    for row in rows:
        for column, panel in enumerate(row):
            parts += _drawn(panel, column * COLUMN, top)
        top += max(panel.height for panel in row)
    return document(parts, top + 12, 2 * COLUMN)


def _drawn(panel: Panel, left: int, top: int) -> list[str]:
    scale = (COLUMN - LEFT - LABEL) / max(bar.value for bar in panel.bars)
    zero = left + LEFT
    parts = [f'<text x="{left + 12}" y="{top + 24}" {FONT} font-weight="600">{escape(panel.title)}</text>']
    for number, bar in enumerate(panel.bars):
        y = top + HEAD - 12 + number * BAR
        width = max(bar.value * scale, 1.0)
        parts += [
            f'<text x="{zero - 6}" y="{y + BAR - 5}" {FONT} text-anchor="end">{escape(bar.title)}</text>',
            f'<rect x="{zero}" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{bar.colour}"/>',
            f'<text x="{zero + width + 5:.1f}" y="{y + BAR - 5}" {FONT}>{escape(bar.label)}</text>',
        ]
    return parts
