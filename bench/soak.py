"""Whether a server that is used for long grows, slows down or answers wrongly; see docs/reliability.md.

    ./dev bench soak                       # 20 minutes; prints tables, fails where it is not as it should
    ./dev bench soak --minutes 30 --write  # into docs/reliability.json, .svg and .md, too

One gemmwire-serve on the CPU is sent 80 % of the requests that it can answer, at random moments: 1, 16 and 64
rows, JSON and binary, each answer held to the bytes that the version it names has to give. Meanwhile weights
are replaced, a model comes and goes, and one request in fifty is malformed. Linux only, for /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "bench"), str(ROOT / "tests")]

from soaking import changes, exact, report  # noqa: E402
from soaking.growth import SETTLE_S  # noqa: E402
from soaking.server import Server, server  # noqa: E402
from soaking.tally import Sampler, Tally  # noqa: E402
from soaking.traffic import Traffic, Versions  # noqa: E402

CAPACITY_S, SAMPLE_S, PART = 10.0, 5.0, 0.8


async def sampled(sampler: Sampler, samples: list[dict[str, Any]]) -> None:
    """Until it is cancelled; every twelfth is told."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        samples.append(asdict(sampler.sample()))
        if len(samples) % 12 == 0:
            print(" ".join(f"{name} {value}" for name, value in samples[-1].items()), file=sys.stderr)


async def soak(running: Server, seconds: float) -> dict[str, Any]:
    """The traffic, and all that goes on beside it."""
    versions = {layer: Versions() for layer in (*exact.SHAPES, *exact.GUESTS)}
    requests = exact.requests()
    warm = Traffic(running.port, requests, versions, Tally())
    capacity = await warm.capacity(CAPACITY_S)
    print(f"capacity {capacity:.0f}/s, {PART * capacity:.0f}/s from now on", file=sys.stderr)
    tally = Tally(problems=warm.tally.problems)
    samples: list[dict[str, Any]] = []
    traffic = Traffic(running.port, requests, versions, tally)
    beside = [
        asyncio.ensure_future(work)
        for work in (
            sampled(Sampler(tally, running.pid), samples),
            changes.refits(running.port, versions, tally),
            changes.guests(traffic, exact.requests(exact.GUESTS)),
        )
    ]
    steady = asyncio.ensure_future(traffic.steady(PART * capacity, seconds))
    await asyncio.wait([steady, *beside], return_when=asyncio.FIRST_COMPLETED)
    for task in (*beside, *([] if steady.done() else [steady])):
        task.cancel()
    ended = await asyncio.gather(*beside, return_exceptions=True)
    problems = [f"it ended early: {error!r}" for error in ended if isinstance(error, Exception)]
    return {
        "capacity": round(capacity, 1),
        "rate": round(PART * capacity, 1),
        "counts": {name: tally.counts[name] for name in counted(tally)},
        "problems": [*tally.problems, *problems],
        "samples": samples,
    }


def counted(tally: Tally) -> list[str]:
    always = ("answered", "wrong", "failed", "refused", "late", "fresh", "malformed", "refits", "visits")
    return [*always, *sorted(tally.counts.keys() - set(always))]


def measured(minutes: float, settle_s: float) -> dict[str, Any]:
    began = time.perf_counter()
    with server() as running:
        found = asyncio.run(soak(running, 60 * minutes))
        found["problems"] += [f"in the log: {line}" for line in running.faults()]
    if running.status != 0:
        found["problems"].append(f"the server ended with status {running.status}, not 0")
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)
    return {"minutes": minutes, "settle_s": settle_s, "machine": machine(), **found}


def machine() -> dict[str, Any]:
    return {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--settle-s", type=float, default=SETTLE_S, help="seconds that do not count (default: 120)"
    )
    parser.add_argument("--write", action="store_true", help="into docs/, in the place of what is there")
    options = parser.parse_args(arguments)
    found = measured(options.minutes, options.settle_s)
    print(report.tables(found))
    if options.write:
        report.write(found, ROOT / "docs")
    sentences = report.problems(found)
    for sentence in sentences:
        print(f"soak: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
