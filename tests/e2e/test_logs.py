"""The log of a process: JSON to its last line."""

from __future__ import annotations

import http.client
import json
import signal
from urllib.parse import urlsplit

import pytest

from process import COMMAND, started

pytestmark = pytest.mark.e2e


def test_every_line_is_json_from_the_first_to_the_last() -> None:
    """Guards: a line of uvicorn's, or of the announcement, that the collector cannot read."""
    flags = ("--port", "0", "--random-layer", "r=8x64", "--log-format", "json", "--access-log")
    with started([*COMMAND, *flags]) as running:
        assert running.stderr is not None
        try:
            lines = []
            for line in running.stderr:
                lines.append(json.loads(line))
                if "url" in lines[-1]:
                    break
            connection = http.client.HTTPConnection(urlsplit(lines[-1]["url"]).netloc, timeout=30)
            connection.request("GET", "/v2/health/ready", headers={"X-Request-Id": "look"})
            assert connection.getresponse().status == 200
            connection.close()
            running.send_signal(signal.SIGTERM)
            out, rest = running.communicate(timeout=30)
        finally:
            running.kill()
    assert out == ""
    lines += [json.loads(line) for line in rest.splitlines()]
    assert [line["path"] for line in lines if line.get("request_id") == "look"] == ["/v2/health/ready"]
