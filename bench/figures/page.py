"""A page of docs/ of which one part, between two marks, is written from what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def replaced(page: str, text: str) -> str:
    """The page with `text` between its marks. ValueError where it has not both, once."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the page has to hold {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
