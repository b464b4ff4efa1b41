"""What was found, as a table for people and as JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .host import Fact
from .trial import FAILS, ROWS, SPEC, WORKS, Trial

FORMAT = 1
_GREEN, _YELLOW, _RED, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[0m"
_COLOUR = {WORKS: _GREEN, FAILS: _RED}


@dataclass(frozen=True)
class Report:
    """chosen: the backend that a server of these arguments would take, None where `problem` says why not."""

    device: str
    asked: str
    facts: tuple[Fact, ...]
    backends: tuple[Trial, ...]
    chosen: str | None
    problem: str | None

    @property
    def ok(self) -> bool:
        return any(trial.name == self.chosen and trial.status == WORKS for trial in self.backends)

    def json(self) -> str:
        """Format 1. Later versions may add keys to it; a key that is here keeps its meaning."""
        facts = {fact.name: {"value": fact.value, "lacks": fact.lacks} for fact in self.facts}
        found = {
            "format": FORMAT,
            "ok": self.ok,
            "device": self.device,
            "asked": self.asked,
            "chosen": self.chosen,
            "problem": self.problem,
            "layer": {"n": SPEC.n, "k": SPEC.k, "bias": SPEC.bias, "rows": list(ROWS)},
            "facts": facts,
            "backends": [asdict(trial) for trial in self.backends],
        }
        return json.dumps(found, indent=2)

    def text(self, colour: bool) -> str:
        lines = ["Host", *_host(self.facts, colour), ""]
        lines += [f"Backends on {self.device}, with a layer of N={SPEC.n}, K={SPEC.k} and a bias"]
        lines += _backends(self.backends, colour)
        return "\n".join([*lines, "", _paint(self._verdict(), _GREEN if self.ok else _RED, colour)])

    def _verdict(self) -> str:
        if self.chosen is None:
            return f"{self.asked} chooses none: {self.problem}"
        state = "which works" if self.ok else "which does not work here"
        return f"{self.asked} chooses {self.chosen}, {state}"


def _host(facts: Sequence[Fact], colour: bool) -> list[str]:
    width = max(len(fact.name) for fact in facts)
    return [f"  {fact.name:<{width}}  {_fact(fact, colour)}" for fact in facts]


def _fact(fact: Fact, colour: bool) -> str:
    parts = [fact.value if fact.value is not None else "none"]
    if fact.lacks:
        parts.append(_paint(f"({fact.lacks})", _YELLOW, colour))
    return " ".join(parts)


def _backends(trials: Sequence[Trial], colour: bool) -> list[str]:
    width = max(len(trial.name) for trial in trials)
    times = "".join(f"{f'M={rows}':>12}" for rows in ROWS)
    head = f"  {'':<{width}}  {'':<11}  {'error':<8}{times}"
    return [head, *(f"  {trial.name:<{width}}  {_trial(trial, colour)}" for trial in trials)]


def _trial(trial: Trial, colour: bool) -> str:
    status = _paint(f"{trial.status.replace('_', ' '):<11}", _COLOUR.get(trial.status, _YELLOW), colour)
    if trial.status != WORKS:
        return f"{status}  {trial.reason}"
    times = "".join(f"{trial.microseconds[str(rows)]:>9.1f} us" for rows in ROWS)
    return f"{status}  {trial.error:<8.2g}{times}"


def _paint(text: str, code: str, colour: bool) -> str:
    return f"{code}{text}{_PLAIN}" if colour else text
