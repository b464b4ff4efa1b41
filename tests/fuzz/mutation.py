"""A mutation that knows JSON, and the two ways in which a length is written in front of it.

Bytes that are changed blindly seldom are JSON any more, and what is behind its parser is then never reached.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

ODD: tuple[Any, ...] = (
    *(0, 1, -1, 2, 31, 33, 1 << 31, 1 << 63, 1 << 64, 1.5, -0.0, 1e300, True, False, None, "", "x", "NaN"),
    *([], {}, [[]], [0], "\ud800", "a" * 300, "../x", "a\0b"),
)


def mutated(data: bytes, chance: random.Random, words: tuple[bytes, ...]) -> bytes | None:
    """`data` with one place of one of its JSON objects changed; None where it holds none."""
    starts = [match.start() for match in re.finditer(rb"\{", data)][:8]
    if not starts:
        return None
    start = chance.choice([starts[0], chance.choice(starts)])
    try:
        document, size = json.JSONDecoder().raw_decode(data[start:].decode("latin-1"))
    except (ValueError, RecursionError):
        return None
    _change(document, chance, words)
    try:
        written = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return None
    return _framed(data, start, start + size, written)


def _framed(data: bytes, start: int, end: int, written: bytes) -> bytes:
    """The new text in place of the old one, and its length in place of the old one's."""
    before, after = data[:start], data[end:]
    line, newline, rest = before.partition(b"\n")
    if before[-8:] == (end - start).to_bytes(8, "little"):
        before = before[:-8] + len(written).to_bytes(8, "little")
    elif newline and line == str(end - start).encode():
        before = str(len(written)).encode() + newline + rest
    return before + written + after


def _change(document: Any, chance: random.Random, words: tuple[bytes, ...]) -> None:
    places = list(_places(document))
    if not places:
        return
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        holder, key = chance.choice(places)
        kind = chance.randrange(5)
        try:
            if kind == 0:
                del holder[key]
            elif kind == 1:
                other, other_key = chance.choice(places)
                holder[key] = json.loads(json.dumps(other[other_key]))
            elif kind == 2 and isinstance(holder, list):
                holder.insert(chance.randrange(len(holder) + 1), _odd(chance, words))
            elif kind == 2:
                holder[str(_odd(chance, words))] = holder[key]
            elif isinstance(holder[key], int):
                holder[key] += chance.choice((-8, -1, 1, 8, 255))
            else:
                holder[key] = _odd(chance, words)
        except (KeyError, IndexError):  # of a place that an earlier change took away
            continue


def _odd(chance: random.Random, words: tuple[bytes, ...]) -> Any:
    if words and chance.random() < 0.5:
        try:
            return json.loads(chance.choice(words))
        except ValueError:
            pass
    return chance.choice(ODD)


def _places(node: Any) -> Any:
    """(holder, key) of every value of a document."""
    keys = range(len(node)) if isinstance(node, list) else list(node) if isinstance(node, dict) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])
