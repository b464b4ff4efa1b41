"""A machine without a network: what the service reaches for by itself, which is nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from process import environment, started

pytestmark = pytest.mark.e2e

# An audit hook hears of every connection and name that Python code asks for, in any package and thread.
GUARDED = """
import sys
def note(event, arguments):
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[-1], tuple):
        print("REACHED", event, arguments[-1], file=sys.stderr, flush=True)
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and arguments[0] not in (None, "127.0.0.1"):
        print("REACHED", event, arguments[0], file=sys.stderr, flush=True)
sys.addaudithook(note)
from gemmwire_service.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def reached(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("REACHED")]


def guarded(*arguments: str) -> list[str]:
    return [sys.executable, "-c", GUARDED, *arguments]


def test_serving_reaches_for_no_other_machine() -> None:
    """Guards: a file that is fetched at the first use, which hangs or fails where there is no network."""
    served = ("--model", "demo=glassllm", "--random-layer", "r=8x64")
    with started(guarded("--port", "0", "--device", "cpu", *served)) as running:
        assert running.stdout is not None
        try:
            url = next(match for line in running.stdout if (match := re.search(r"http://\S+?:\d+", line)))[0]
            body = b'{"inputs":[{"name":"x","shape":[1,64],"datatype":"FP32","data":[' + b"1," * 63 + b"1]}]}"
            for path, data in (
                ("/v2/models/r/infer", body),
                ("/metrics", None),
                ("/", None),
                ("/docs", None),
            ):
                with urllib.request.urlopen(url + path, data, timeout=30) as reply:
                    assert reply.status == 200
            running.send_signal(signal.SIGTERM)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 0, said
    assert reached(said) == []


def test_the_check_of_an_image_reaches_for_no_other_machine() -> None:
    done = subprocess.run(
        guarded("check", "--device", "cpu"), capture_output=True, text=True, timeout=100, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert reached(done.stderr) == []


def test_the_guard_sees_what_it_is_for() -> None:
    code = GUARDED.partition("from gemmwire")[0] + "import socket\nsocket.getaddrinfo('localhost', 80)\n"
    code += "try: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass\n"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stderr
    assert [line.split()[1] for line in reached(said)] == ["socket.getaddrinfo", "socket.connect"]
