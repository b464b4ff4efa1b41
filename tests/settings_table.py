"""The table of settings in docs/operations.md, made from the settings themselves.

    ./dev python tests/settings_table.py

writes it anew; a test holds the page to it.
"""

from __future__ import annotations

from typing import get_args

from pydantic.fields import FieldInfo

from gemmwire_service.settings import Settings
from source_tree import ROOT, written

PAGE = ROOT / "docs" / "operations.md"
BEGIN = "<!-- settings: written by tests/settings_table.py -->"
END = "<!-- end of settings -->"

_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


def table() -> str:
    lines = ["| setting | default | what it is |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        lines.append(f"| {flag(name, field)} | {default(name, field)} | {field.description} |")
    return "\n".join(lines)


def flag(name: str, field: FieldInfo) -> str:
    text = "--" + name.replace("_", "-")
    return f"`{text}`, `--no-{text[2:]}`" if field.annotation is bool else f"`{text}`"


def default(name: str, field: FieldInfo) -> str:
    value = field.default
    if field.annotation is bool:
        return "on" if value else "off"
    if get_args(field.annotation)[:1] == (str,) or value == "":
        return ""
    if isinstance(value, int) and "bytes" in name:
        for shift, unit in _UNITS:
            if value and value % (1 << shift) == 0:
                return f"`{value}` ({value >> shift} {unit})"
    return f"`{value}`"


def renewed(page: str) -> str:
    """The page with the table as it ought to be."""
    return written(page, BEGIN, END, table())


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
