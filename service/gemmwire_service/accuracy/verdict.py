"""fine, look or keep in BF16: the rule, as data, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .inputs import CAPTURED
from .output import OutputFigures
from .weight import WeightFigures

FINE, LOOK, KEEP = VERDICTS = ("fine", "look", "keep")  # each is worse than those before it
LABELS = {FINE: "fine", LOOK: "look", KEEP: "keep in BF16"}
ROWS_FROM = 32  # N from which on the worst rows count: with few outputs a y near zero makes any error large


@dataclass(frozen=True)
class Limit:
    """A figure that is fine up to `look`, and from `keep` on a reason to keep the layer in BF16."""

    key: str
    what: str
    look: float
    keep: float


WEIGHT = Limit("weight", "relative error of the weight", 0.04, 0.08)
OUTPUT = Limit("output", "output error of the median row of x", 0.06, 0.15)
ROWS = Limit("rows", f"output error of the row at the 99th percentile, where N >= {ROWS_FROM}", 0.12, 0.5)
FLUSHED = Limit("flushed", "share of the weight's elements that become zero", 0.01, 0.1)
LIMITS = (WEIGHT, OUTPUT, ROWS, FLUSHED)

RULE = (
    "A layer is fine where none of its figures is above its first bound, and to be kept in BF16 where any is "
    "above its second; else it is one to look at. Outputs are judged on captured rows of x where there are "
    "any, else on Gaussian and outlier-heavy ones."
)


@dataclass(frozen=True)
class Judged:
    """reasons: what is above a bound, in words; none for a layer that is fine."""

    verdict: str
    reasons: tuple[str, ...]


def judge(n: int, weight: WeightFigures, outputs: Mapping[str, OutputFigures]) -> Judged:
    """n: output features of the layer; outputs: by kind of x."""
    found = [
        _above(WEIGHT, weight.fidelity.relative_error, ""),
        _above(FLUSHED, weight.fidelity.share(weight.fidelity.flushed), ""),
    ]
    for kind in (CAPTURED,) if CAPTURED in outputs else outputs:
        found.append(_above(OUTPUT, outputs[kind].row_error.median, kind))
        if n >= ROWS_FROM:
            found.append(_above(ROWS, outputs[kind].row_error.p99, kind))
    above = [each for each in found if each is not None]
    verdict = max((verdict for verdict, _ in above), key=VERDICTS.index, default=FINE)
    return Judged(verdict, tuple(reason for _, reason in above))


def at_least(verdict: str, bound: str) -> bool:
    return VERDICTS.index(verdict) >= VERDICTS.index(bound)


def _above(limit: Limit, value: float, kind: str) -> tuple[str, str] | None:
    if value <= limit.look:
        return None
    verdict, bound = (KEEP, limit.keep) if value > limit.keep else (LOOK, limit.look)
    on = f"{kind} x: " if kind else ""
    return verdict, f"{on}{limit.what} is {value:.3g}, above {bound:g}"
