"""New weights, and a model that comes and goes, beside the traffic."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

from soaking.connection import Answer, Broken, Connection
from soaking.exact import GUEST, SHAPES, WEIGHTS, Request, bodies, with_body
from soaking.tally import Tally
from soaking.traffic import Traffic, Versions

REFIT_S, GUEST_S = 5.0, 20.0


async def once(port: int, sent: bytes) -> Answer:
    connection = await Connection.open(port)
    try:
        return await connection.ask(sent)
    finally:
        connection.close()


async def refits(port: int, versions: dict[str, Versions], tally: Tally) -> None:
    """The weights of each layer in turn, until it is cancelled."""
    turns = itertools.cycle([(layer, bodies(layer, shape)) for layer, shape in SHAPES.items()])
    for layer, sent in turns:
        await asyncio.sleep(REFIT_S)
        try:
            await refit(port, layer, sent, versions[layer])
            tally.counts["refits"] += 1
        except (Broken, OSError, ValueError) as error:
            tally.broken("failed", f"refit of {layer}: {error}")


async def refit(port: int, layer: str, sent: list[bytes], versions: Versions) -> None:
    """The next weight of the layer. ValueError where it is not answered as it should be."""
    old, new = versions.current, versions.current + 1
    versions.weights[new] = (versions.weights[old] + 1) % WEIGHTS  # from now on it may be answered with
    path = f"PUT /v2/repository/models/{layer}/weights HTTP/1.1"
    answer = await once(
        port, with_body([path, "Host: soak", f'If-Match: "{old}"'], sent[versions.weights[new]])
    )
    if answer.status != 200 or json.loads(answer.body)["version"] != str(new):
        raise ValueError(f"{answer.status} {answer.body[:200]!r}, not version {new}")
    versions.current = new


async def guests(traffic: Traffic, requests: list[Request]) -> None:
    """Load a model, ask it, unload it, until this is cancelled."""
    while True:
        await asyncio.sleep(GUEST_S)
        try:
            await visit(traffic, requests)
            traffic.tally.counts["visits"] += 1
        except (Broken, OSError, ValueError) as error:
            traffic.tally.broken("failed", f"load and unload: {error}")


async def visit(traffic: Traffic, requests: list[Request]) -> None:
    await repository(traffic.port, "load")
    for request in requests:
        connection = await traffic.ask(None, request, time.perf_counter())
        if connection is not None:
            connection.close()
    await repository(traffic.port, "unload")
    versions = traffic.versions[requests[0].layer]
    versions.current += 1  # the next load's
    versions.weights[versions.current] = 0
    answer = await once(traffic.port, requests[0].sent)
    if answer.status != 404:
        raise ValueError(f"{answer.status} from a layer that was unloaded, not 404")


async def repository(port: int, verb: str) -> None:
    path = f"POST /v2/repository/models/{GUEST}/{verb} HTTP/1.1"
    answer = await once(port, with_body([path, "Host: soak"], b""))
    if answer.status != 200:
        raise ValueError(f"{verb}: {answer.status} {answer.body[:200]!r}")
