"""A page of docs/ of which one part, between two marks, is written from what was measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def marks(what: str) -> tuple[str, str]:
    return f"<!-- {what}: begin -->", f"<!-- {what}: end -->"


BEGIN, END = marks("measured")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def as_json(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def replaced(page: str, text: str, what: str = "measured") -> str:
    """The page with `text` between its marks. ValueError where it has not both, once."""
    first, last = marks(what)
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in after or last in after:
        raise ValueError(f"the page has to hold {first} and {last}, once each and in this order")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"
