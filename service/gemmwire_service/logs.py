"""The log: a line each, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from .settings import Settings

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FACTS = "facts"  # of a record: what it says, for machines


def configure(settings: Settings) -> None:
    """The root logger writes to stderr in the form that the settings name."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])


def with_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """The `extra` of a logging call: keys of its JSON line."""
    return {_FACTS: facts}


class JsonLines(logging.Formatter):
    """One object a line, ASCII: whatever a message holds, it ends no line and begins none."""

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FACTS, {}),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)
