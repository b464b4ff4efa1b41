"""`gemmwire stats URL [LAYER ...]`."""

from __future__ import annotations

import argparse
from typing import Any

from gemmwire.client import Client
from gemmwire.errors import WireError

from .result import Result, table

_DEVICE = ("compute_input", "compute_infer", "compute_output")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layers", nargs="*", metavar="LAYER", help="these and no others (all)")


def run(client: Client, options: argparse.Namespace) -> Result:
    names = options.layers or [layer.name for layer in client.layers()]
    document = [client.stats(name) for name in names]
    heads = ("layer", "requests", "failed", "rows", "forwards", "total us", "queue us", "device us")
    return Result(document, table(heads, [_row(entry) for entry in document]))


def _row(entry: dict[str, Any]) -> list[object]:
    """Times are means of a request, in microseconds."""
    try:
        times = entry["inference_stats"]
        done = times["success"]["count"]
        counts = [times["fail"]["count"], entry["inference_count"], entry["execution_count"]]
        means = [
            sum(times[stage]["ns"] for stage in stages) / done / 1e3 if done else None
            for stages in (("success",), ("queue",), _DEVICE)
        ]
        return [entry["name"], done, *counts, *means]
    except (KeyError, TypeError):
        raise WireError("answer_invalid", f"These are no statistics of a layer: {entry!r:.200}") from None
