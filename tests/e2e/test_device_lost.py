"""A device that is lost while the server runs: who is told, and that the process ends."""

from __future__ import annotations

import re
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from process import started

pytestmark = pytest.mark.e2e

# The emulation of a server that is ready fails as CUDA does, at a request whose x begins with 512.
SERVER = """
import sys, time, torch
from gemmwire_service.__main__ import main
from gemmwire_service.backends.emulation import Operands
real = Operands.rounded  # what every forward begins with
def rounded(self, x, *width):
    if (x[:, 0] == 512.0).any():
        time.sleep(1.0)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return real(self, x, *width)
Operands.rounded = rounded
sys.exit(main(sys.argv[1:]))
"""
ARGUMENTS = ["--port", "0", "--device", "cpu", "--random-layer", "a=64x64", "--random-layer", "b=2048x2048"]


def post(url: str, layer: str, first: float, k: int) -> tuple[int, str]:
    """Many rows, so that the device thread computes them."""
    numbers = ",".join(["0"] * (64 * k - 1))
    body = f'{{"inputs":[{{"name":"x","shape":[64,{k}],"datatype":"FP32","data":[{first},{numbers}]}}]}}'
    request = urllib.request.Request(f"{url}/v2/models/{layer}/infer", body.encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_everybody_is_told_and_the_process_ends_with_status_1() -> None:
    """Guards: a process that answers errors for hours with its health green; clients that wait for ever."""
    with started([sys.executable, "-c", SERVER, *ARGUMENTS]) as server:
        try:
            assert server.stdout is not None
            assert server.stderr is not None
            log: list[str] = []
            reader = threading.Thread(target=log.extend, args=(server.stderr,), daemon=True)
            reader.start()
            found = next(match for line in server.stdout if (match := re.search(r"http://\S+?:\d+", line)))
            url = found[0]
            assert post(url, "b", 1.0, 2048)[0] == 200
            with ThreadPoolExecutor(8) as pool:
                poisoned = pool.submit(post, url, "b", 512.0, 2048)
                others = [pool.submit(post, url, "b", 1.0, 2048) for _ in range(7)]
                answers = [poisoned.result(), *(other.result() for other in others)]
            status, text = answers[0]
            assert status == 503
            assert '"device_lost"' in text
            assert "an illegal memory access was encountered" in text
            assert {status for status, _ in answers} <= {200, 503}
            assert server.wait(30) == 1
            reader.join(10)
            assert "cpu is lost" in "".join(log)
        finally:
            if server.poll() is None:
                server.kill()
