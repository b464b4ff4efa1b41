"""The samples as an SVG: a panel for each quantity, over the minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from figures.svg import FONT, WIDTH, document

from soaking.growth import MIB

LEFT, RIGHT, HEAD = 70, 20, 10
HEIGHT, TITLE, GAP = 90, 24, 22
DARK, LIGHT, GREY = "#1d4ed8", "#f59e0b", "#e5e7eb"


@dataclass(frozen=True)
class Line:
    name: str
    title: str
    colour: str
    scale: float = 1.0


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]


PANELS = (
    Panel("memory, MiB", (Line("rss", "resident", DARK, MIB), Line("anon", "of it of no file", LIGHT, MIB))),
    Panel(
        "file descriptors and threads",
        (Line("fds", "descriptors beside the clients' connections", DARK), Line("threads", "threads", LIGHT)),
    ),
    Panel("latency, ms", (Line("p50_ms", "p50", DARK), Line("p99_ms", "p99", LIGHT))),
    Panel("right answers a second", (Line("rate", "", DARK),)),
    Panel("cores that other processes kept busy", (Line("others", "", DARK),)),
)


def chart(found: dict[str, Any]) -> str:
    """`found` as report.as_json writes it; what lies in grey is the time for warming up."""
    samples, parts, top = found["samples"], [], HEAD
    width = max(samples[-1]["at"], 1.0)
    for panel in PANELS:
        parts += _panel(panel, samples, width, min(found["settle_s"], width), top)
        top += TITLE + HEIGHT + GAP
    parts.append(_text(WIDTH - RIGHT, top + 8, "minutes", "end"))
    return document(parts, top + 16)


def _panel(
    panel: Panel, samples: Sequence[dict[str, Any]], width: float, settle: float, top: int
) -> list[str]:
    bottom = top + TITLE + HEIGHT
    most = max(max(sample[line.name] / line.scale for sample in samples) for line in panel.lines) * 1.1 or 1.0
    across = (WIDTH - LEFT - RIGHT) / width
    parts = [
        f'<rect x="{LEFT}" y="{top + TITLE}" width="{settle * across:.1f}" height="{HEIGHT}" fill="{GREY}"/>',
        *_titles(panel, top),
        _text(LEFT - 6, top + TITLE + 10, f"{most:.0f}" if most >= 100 else f"{most:.3g}", "end"),
        _text(LEFT - 6, bottom, "0", "end"),
        *(
            _text(LEFT + 60 * minute * across, bottom + 14, f"{minute:g}", "middle")
            for minute in _minutes(width)
        ),
    ]
    for line in panel.lines:
        down = HEIGHT / most / line.scale
        points = " ".join(
            f"{LEFT + sample['at'] * across:.1f},{bottom - sample[line.name] * down:.1f}"
            for sample in samples
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>')
    return [
        *parts,
        f'<path d="M{LEFT} {top + TITLE}V{bottom}H{WIDTH - RIGHT}" stroke="#111827" fill="none"/>',
    ]


def _titles(panel: Panel, top: int) -> list[str]:
    parts, x = [_text(LEFT, top + 14, panel.title, "start", ' font-weight="600"')], LEFT + 250
    for line in panel.lines:
        if line.title:
            parts.append(
                f'<path d="M{x} {top + 10}h14" stroke="{line.colour}" stroke-width="2"/>'
                + _text(x + 19, top + 14, line.title, "start")
            )
            x += 40 + 7 * len(line.title)
    return parts


def _minutes(width: float) -> list[float]:
    """Where the axis has a number: each minute, each second one, or each fifth."""
    step = next((step for step in (0.25, 0.5, 1, 2, 5) if width / 60 / step <= 10), 10)
    return [step * index for index in range(int(width / 60 / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {FONT} text-anchor="{anchor}"{more}>{escape(text)}</text>'
