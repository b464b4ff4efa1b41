"""The form of the log's lines."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from gemmwire_service.logs import JsonLines, with_facts


def line(message: str, *arguments: object, **facts: object) -> str:
    logger = logging.getLogger("gemmwire.test")
    extra = with_facts(facts)
    record = logger.makeRecord(
        logger.name, logging.WARNING, __file__, 1, message, arguments, None, extra=extra
    )
    return JsonLines().format(record)


@pytest.mark.parametrize("text", ["a\nb", 'say "no"', "\x1b[31mred", "\u2028", "caf\u00e9", "\ud800"])
def test_a_message_is_one_line_whatever_it_holds(text: str) -> None:
    """Guards: a name that writes lines of its own into the log."""
    written = line("layer %s", text, layer=text)
    assert written.isascii()
    assert written.isprintable()
    document = json.loads(written)
    assert (document["message"], document["layer"]) == (f"layer {text}", text)
    assert (document["level"], document["logger"]) == ("warning", "gemmwire.test")
    assert document["time"].endswith("+00:00")


def test_a_traceback_stays_within_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    written = JsonLines().format(record)
    assert "\n" not in written
    assert "ValueError: no" in json.loads(written)["exception"]
