"""Which layers are fused into one: rules by the last part of their names.

A rule is one of KNOWN, or NAME=PART+PART. Commas and arrows would be cut up by variables and shells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SettingsError

MOST = 8  # parts of one layer
WHOLE = "y"  # the output that a part cannot be named like
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Rule:
    """Modules of these names, side by side in one module, become `name` there."""

    name: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.parts)}"


KNOWN: dict[str, tuple[Rule, ...]] = {
    "qkv": (
        Rule("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        Rule("qkv", ("query", "key", "value")),
        Rule("wqkv", ("wq", "wk", "wv")),
        Rule("W_QKV", ("W_Q", "W_K", "W_V")),
    ),
    "gate_up": (
        Rule("gate_up_proj", ("gate_proj", "up_proj")),
        Rule("w13", ("w1", "w3")),
    ),
}


def read_rules(texts: Sequence[str]) -> tuple[Rule, ...]:
    """`qkv`, `gate_up` or NAME=PART+PART[+...]. Errors: SettingsError."""
    rules: list[Rule] = []
    for text in (piece for given in texts for piece in given.split(",")):
        rules += KNOWN[text] if text in KNOWN else (_rule(text),)
    twice = [
        part for part, count in Counter(part for rule in rules for part in rule.parts).items() if count > 1
    ]
    if twice:
        raise SettingsError(
            f"--fuse names {twice[0]!r} twice; a module is part of one fused layer at most",
            got=twice[0],
        )
    return tuple(rules)


def _rule(text: str) -> Rule:
    name, _, parts = text.partition("=")
    rule = Rule(name, tuple(parts.split("+")))
    well_formed = all(_NAME.fullmatch(each) for each in (name, *rule.parts))
    if not well_formed or not 2 <= len(rule.parts) <= MOST or WHOLE in rule.parts:
        raise SettingsError(
            f"--fuse is {text[:200]!r}; it must be {', '.join(KNOWN)} or NAME=PART+PART, such as "
            f"qkv_proj=q_proj+k_proj+v_proj: the last parts of modules' names, 2 to {MOST} of them, and "
            f"none of them {WHOLE!r}",
            expected="NAME=PART+PART",
            got=text[:200],
        )
    return rule
