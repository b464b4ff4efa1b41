"""The frame of a drawing, and its letters."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 780
FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="#111827"'


def document(parts: Sequence[str], height: int, width: int = WIDTH) -> str:
    """The elements on white -> SVG."""
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}">'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>"]) + "\n"
