"""What was found as docs/reliability.md shows it: JSON, tables between two marks, and a chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from figures.page import as_json, replaced, table

from soaking.chart import chart
from soaking.growth import QUIET_CORES, RULES, Verdict, judged

PAGE, JSON, CHART = "reliability.md", "reliability.json", "reliability.svg"
TOO_SHORT = "too short to say whether anything grows"


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    return judged(found["samples"], found["settle_s"])


def problems(found: dict[str, Any]) -> list[str]:
    """Every sentence that fails the run."""
    return [*found["problems"], *(each.sentence() for each in verdicts(found) if each.grew)]


def tables(found: dict[str, Any]) -> str:
    """Everything between the marks."""
    machine = found["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}"
    return "\n\n".join(
        [
            f"{found['minutes']:g} min, {where}; server and clients on the same cores, "
            f"of which other processes kept {_mean(found, 'others'):.1f} busy.",
            _counts(found),
            _growth(found),
        ]
    )


def _counts(found: dict[str, Any]) -> str:
    counts = found["counts"]
    forms = ", ".join(
        f"{count} {name.removeprefix('form ')}" for name, count in counts.items() if name.startswith("form ")
    )
    rows = [
        ("capacity, the same requests in a closed loop", f"{found['capacity']:.0f}/s"),
        ("sent, at random moments", f"{found['rate']:.0f}/s"),
        ("right answers, each compared byte for byte", f"{counts['answered']} ({forms})"),
        ("wrong answers", str(counts["wrong"])),
        ("failed: another status than it has to have, or none", str(counts["failed"])),
        ("refused with 503", str(counts["refused"])),
        ("not sent, for 512 were under way", str(counts["late"])),
        ("on a connection of their own", str(counts["fresh"])),
        ("malformed", str(counts["malformed"])),
        ("weights replaced", str(counts["refits"])),
        ("loads and unloads of a second model", str(counts["visits"])),
    ]
    return table(("", "in all"), rows)


def _growth(found: dict[str, Any]) -> str:
    given = verdicts(found)
    if not given:
        return f"**A run of {found['minutes']:g} min is {TOO_SHORT}.**"
    settle = f"{found['settle_s'] / 60:.3g}"
    head = ("median", f"first quarter after minute {settle}", "last quarter", "ratio", "may grow by", "")
    parts = [table(head, [_row(each) for each in given])]
    left_out = [rule.title for rule in RULES if rule not in [each.rule for each in given]]
    if left_out:
        parts.append(
            f"**Not judged: {', '.join(left_out)}.** Too few samples were taken while other processes "
            f"kept less than {QUIET_CORES:g} of a core busy."
        )
    return "\n\n".join(parts)


def _row(each: Verdict) -> tuple[str, ...]:
    return (
        each.rule.title,
        each.rule.shown(each.first),
        each.rule.shown(each.last),
        f"{each.last / each.first:.3f}" if each.first else "",
        each.rule.allowed(),
        "**grew**" if each.grew else "no growth",
    )


def _mean(found: dict[str, Any], name: str) -> float:
    values = [sample[name] for sample in found["samples"]]
    return float(sum(values) / len(values))


def write(found: dict[str, Any], folder: Path) -> None:
    (folder / JSON).write_text(as_json(found))
    (folder / CHART).write_text(chart(found))
    page = folder / PAGE
    page.write_text(replaced(page.read_text(), tables(found)))
