"""The report as one page that needs nothing from elsewhere: its script draws what stands in it as JSON."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from gemmwire_service.page import directives

_POLICY, _REPORT = "{{policy}}", "{{report}}"


def page(document: dict[str, Any]) -> str:
    """`document` is that of report.py. What its names hold stays text: no `<` of theirs is in the page."""
    template = (files(__package__) / "page.html").read_text(encoding="utf-8")
    report = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return template.replace(_POLICY, "; ".join(directives(template))).replace(_REPORT, report)
