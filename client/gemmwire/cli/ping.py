"""`gemmwire ping URL`."""

from __future__ import annotations

import argparse
import time

from gemmwire.client import Client

from .result import Result


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=5, metavar="N", help="round trips to time (5)")


def run(client: Client, options: argparse.Namespace) -> Result:
    """Status 1 where the server is not ready."""
    server, ready = client.server(), client.ready()
    times = sorted(_round_trip(client) for _ in range(max(1, options.count)))
    document = {
        "url": client.url,
        "name": server.name,
        "version": server.version,
        "ready": ready,
        "best_ms": times[0],
        "median_ms": times[len(times) // 2],
    }
    state = "ready" if ready else "not ready"
    text = (
        f"{client.url}: {server.name} {server.version}, {state}; a round trip takes "
        f"{times[len(times) // 2]:.2f} ms, {times[0]:.2f} at best"
    )
    return Result(document, text, 0 if ready else 1)


def _round_trip(client: Client) -> float:
    began = time.perf_counter()
    client.live()
    return (time.perf_counter() - began) * 1e3
