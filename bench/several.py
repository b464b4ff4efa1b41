"""What it costs to stand several servers side by side: by one client, and behind nginx.

    ./dev python bench/several.py

Two gemmwire-serve on the CPU, each with a Unix socket. In one run, interleaved round by round, p50 of a
request of one client to one of them by TCP and by its Unix socket; to both in turn, by two clients; to both
by a client of both; and through nginx with the example of deploy/ (left out where there is no nginx). Every
answer is held to the first. Told is the best round of each: on two cores that all of them share, the others
measure something else.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from gemmwire import Client

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from nginx import installed, nginx
from process import process

N = K = 1024
REQUESTS = {1: 200, 16: 100, 256: 20, 4096: 4}  # of each M in a round


@contextmanager
def clients(folder: Path) -> Iterator[dict[str, list[Client]]]:
    with ExitStack() as stack:
        urls = []
        for name in range(2):
            options = ("--random-layer", f"r={N}x{K}", "--uds", str(folder / f"{name}.sock"))
            _, printed = stack.enter_context(process(*options))
            urls += re.findall(r"ready on (http://\S+)", "\n".join(printed))
        sockets = [f"unix://{folder}/{name}.sock" for name in range(2)]
        ways = {
            "TCP": [Client(urls[0])],
            "Unix socket": [Client(sockets[0])],
            "two clients in turn": [Client(url) for url in urls],
            "Client([a, b])": [Client(urls)],
            "the same, sockets": [Client(sockets)],
        }
        if installed() is not None:
            ways["nginx"] = [Client(stack.enter_context(nginx(folder)))]
        for each in ways.values():
            for client in each:
                stack.enter_context(client)
        yield ways


def p50(clients: list[Client], x: np.ndarray, expected: np.ndarray, requests: int) -> float:
    """Microseconds."""
    times = []
    for index in range(requests):
        client = clients[index % len(clients)]
        began = time.perf_counter()
        y = client.infer("r", x)
        times.append(time.perf_counter() - began)
        assert np.array_equal(y, expected)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, clients(Path(folder)) as ways:
        print(
            f"{platform.machine()}, x [M, {K}] FP32, W [{N}, {K}], p50 in us, best of {options.rounds} rounds"
        )
        print("| M | " + " | ".join(ways) + " |")
        print("| ---: " * (1 + len(ways)) + "|")
        for m, requests in REQUESTS.items():
            x = np.random.default_rng(m).standard_normal((m, K), dtype=np.float32)
            expected = ways["TCP"][0].infer("r", x)
            rounds = [
                [p50(each, x, expected, requests) for each in ways.values()] for _ in range(options.rounds)
            ]
            print(f"| {m} | " + " | ".join(f"{min(each):.0f}" for each in zip(*rounds, strict=True)) + " |")


if __name__ == "__main__":
    main()
