"""The pieces of bench/soak.py, what it calls growth and what wrong; its figures in docs/reliability.md."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from figures.page import replaced
from soaking import changes, chart, exact, growth, malformed, report, verify
from soaking.connection import Answer, Connection
from soaking.growth import MIB, QUIET_CORES, RULES, SETTLE_S, judged
from soaking.malformed import KINDS, LEAVING, WAITING, mistreat
from soaking.tally import Sample, Sampler, Tally, quantile
from soaking.traffic import Traffic, Versions
from soaking.verify import wrong

from http_calls import HEADER_LENGTH, call
from serving import Served, serving, settings
from source_tree import ROOT

DOCS = ROOT / "docs"
Change = Callable[[int], dict[str, float]]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What was measured last, and committed."""
    result: dict[str, Any] = json.loads((DOCS / report.JSON).read_text())
    return result


@pytest.fixture(scope="module")
def guests() -> list[exact.Request]:
    found: list[exact.Request] = exact.requests(exact.GUESTS)
    return found


# --- growth ---


def series(change: Change = lambda index: {}, count: int = 240) -> list[dict[str, Any]]:
    """A sample every 5 seconds that says the same each time, but for `change`."""
    same = {"rss": 300.0 * MIB, "fds": 14, "threads": 9, "p50_ms": 8.0, "p99_ms": 40.0, "others": 0.1}
    return [{"at": 5.0 * (index + 1), **same, **change(index)} for index in range(count)]


def grown(samples: list[dict[str, Any]]) -> list[str]:
    return [each.rule.name for each in judged(samples) if each.grew]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda index: {}, []),
        (lambda index: {"rss": (300 + 0.1 * index) * MIB}, ["rss"]),  # 1.2 MiB a minute
        (lambda index: {"rss": (300 - 0.1 * index) * MIB}, []),
        (lambda index: {"rss": (300 + 3 * min(index, 24)) * MIB}, []),  # while it warms up
        (lambda index: {"rss": (300 + 200 * (index % 7 == 0)) * MIB}, []),  # a peak now and then
        (lambda index: {"fds": 14 + index // 50}, ["fds"]),
        (lambda index: {"fds": 14 + index % 3}, []),
        (lambda index: {"threads": 9 + index // 60}, ["threads"]),
        (lambda index: {"p50_ms": 8 + 0.1 * index}, ["p50_ms"]),
        (lambda index: {"p99_ms": 40 + 0.5 * index}, ["p99_ms"]),
        (lambda index: {"p50_ms": 8 + 0.01 * index, "p99_ms": 40 + 0.1 * index}, []),
    ],
)  # fmt: skip
def test_what_grows_is_seen_and_what_does_not_is_not(change: Change, names: list[str]) -> None:
    """Guards: a leak of a megabyte a minute that passes, and a warm-up or a peak that fails."""
    assert grown(series(change)) == names


def test_a_sentence_says_what_grew_from_what_to_what() -> None:
    samples = series(lambda index: {"fds": 14 + 10 * (index > 120)})
    assert report.problems({"problems": ["one"], "settle_s": SETTLE_S, "samples": samples}) == [
        "one",
        "file descriptors beside the clients' connections grew from 14 to 24, more than 2",
    ]


def test_a_short_run_is_not_judged() -> None:
    """Guards: a run of three minutes that says that nothing grows."""
    short = series(count=int(SETTLE_S / 5) + growth.LEAST_SAMPLES - 1)
    assert judged(short) == []
    assert len(judged(series(count=len(short) + 1))) == len(RULES)


def test_latency_counts_where_nobody_else_took_the_cores() -> None:
    """Guards: another process's load taken for growth, or for its absence without a word."""
    loaded = series(lambda index: {"others": 1.2 * (index > 120), "p50_ms": 8 + 90 * (index > 120)})
    assert grown(loaded) == []
    never = judged(series(lambda index: {"others": QUIET_CORES + 0.1}))
    assert [each.rule.name for each in never] == [rule.name for rule in RULES if not rule.quiet]


# --- answers ---


@pytest.fixture(scope="module")
def guest_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("root")
    exact.write_models(root)
    models = tuple(f"{model}={root / model}" for model in (exact.MODEL, exact.GUEST))
    with serving(settings(model=models, model_root=str(root), stall_s=1)) as served:
        yield served


def asked(served: Served, request: exact.Request) -> Answer:
    head, _, body = request.sent.partition(b"\r\n\r\n")
    _, *lines = head.decode().split("\r\n")
    reply = call(
        served,
        "POST",
        f"/v2/models/{request.layer}/infer",
        body,
        dict(line.split(": ", 1) for line in lines[1:]),
    )
    length = reply.headers.get(HEADER_LENGTH.lower())
    return Answer(reply.status, reply.body, int(length) if length else None)


def one_of_each(requests: list[exact.Request]) -> list[exact.Request]:
    return list({(request.form, request.rows): request for request in requests}.values())


def test_the_server_answers_what_is_expected_of_it(guest_server: Served, guests: list[exact.Request]) -> None:
    """Guards: a verifier that calls right answers wrong. The ragged layer has a bias too."""
    ragged = exact.requests({"steady.ragged": exact.SHAPES["steady.ragged"]})
    for request in one_of_each(guests) + one_of_each(ragged):
        assert wrong(request, asked(guest_server, request), {1: 0}) == ""


def test_one_flipped_bit_is_wrong(guest_server: Served, guests: list[exact.Request]) -> None:
    """Guards: a verifier that lets through what differs in a bit, in any form of answer."""
    for request in one_of_each(guests):
        answer = asked(guest_server, request)
        if answer.json_size is None:
            value = answer.body.partition(b'"data":[')[2].partition(b",")[0]
            body = answer.body.replace(b'"data":[' + value, b'"data":[' + str(float(value) * 2 + 1).encode())
        else:
            body = answer.body[:-3] + bytes([answer.body[-3] ^ 1]) + answer.body[-2:]
        found = wrong(request, replace(answer, body=body), {1: 0})
        assert "is 0x" in found, f"{request.form}: {found!r}"


def test_an_answer_of_another_weight_or_version_is_wrong(
    guest_server: Served, guests: list[exact.Request]
) -> None:
    """Guards: an answer of the old weight under the new version's name, and one that comes too late."""
    request = guests[0]
    answer = asked(guest_server, request)
    assert "it is the answer of weight 0" in wrong(request, answer, {1: 1})
    assert "nobody has sent" in wrong(request, answer, {2: 0})
    assert "asked when 2 was served" in wrong(request, answer, {1: 0, 2: 1}, least=2)
    assert "no answer to read" in wrong(request, replace(answer, body=b"{}", json_size=None), {1: 0})
    assert "bytes, not" in wrong(request, replace(answer, body=answer.body[:-1]), {1: 0})


def test_weights_differ_in_every_answer(guests: list[exact.Request]) -> None:
    """Guards: a refit that nobody would notice."""
    assert all(len(set(request.expected)) == exact.WEIGHTS for request in guests)


# --- traffic ---


@pytest.mark.parametrize("kind", [each for each in KINDS if each not in WAITING], ids=lambda each: each.name)
def test_a_malformed_request_is_answered_as_it_says(guest_server: Served, kind: malformed.Malformed) -> None:
    told: list[str] = []
    asyncio.run(mistreat(guest_server.port, kind, told.append))
    assert told == []


def test_another_answer_than_a_malformed_request_has_to_have_is_told(guest_server: Served) -> None:
    told: list[str] = []
    for kind in (
        replace(KINDS[0], statuses=(200,)),
        replace(LEAVING[0], sent=exact.post("x", b""), statuses=(400,)),
    ):
        asyncio.run(mistreat(guest_server.port, kind, told.append))
    assert ["not 200" in told[0], "not 400" in told[1]] == [True, True]


def test_traffic_with_refits_and_a_visit_goes_right(
    guest_server: Served, guests: list[exact.Request]
) -> None:
    """Guards: pieces that do not fit, found after twenty minutes."""
    layer, tally = "steady.ragged", Tally()
    requests = exact.requests({layer: exact.SHAPES[layer]})
    versions = {layer: Versions(), f"{exact.GUEST}.layer": Versions({1: 0, 2: 0}, 2)}
    traffic = Traffic(guest_server.port, requests, versions, tally)

    async def run() -> Sample:
        sampler = Sampler(tally, os.getpid())
        steady = asyncio.ensure_future(traffic.steady(100, 1.0))
        await changes.refit(traffic.port, layer, exact.bodies(layer, exact.SHAPES[layer]), versions[layer])
        await changes.visit(traffic, guests[:2])
        await steady
        assert Connection.opened == 0
        found: Sample = sampler.sample()
        return found

    sample = asyncio.run(run())
    assert tally.problems == []
    assert versions[layer].weights == {1: 0, 2: 1}
    assert tally.counts["answered"] > 2
    assert sample.rate > 0


def test_quantiles() -> None:
    times = [index / 1000 for index in range(100)]
    assert (quantile(times, 0.5), quantile(times, 0.99), quantile([], 0.5)) == (50.0, 99.0, 0.0)


# --- the page ---


def test_the_page_shows_what_was_found(found: dict[str, Any]) -> None:
    """Guards: a table that was edited, or forgotten when the figures changed."""
    page = (DOCS / report.PAGE).read_text()
    assert page == replaced(page, report.tables(found)), "./dev bench soak --write"
    assert (DOCS / report.CHART).read_text() == chart.chart(found), "./dev bench soak --write"
    assert f"of {len(KINDS)} kinds" in page


def test_the_run_that_is_shown_went_well(found: dict[str, Any]) -> None:
    assert report.problems(found) == []
    assert found["counts"]["wrong"] == found["counts"]["failed"] == 0
    assert set(found["samples"][0]) == {field.name for field in fields(Sample)}


def test_the_chart_has_every_line_within_it(found: dict[str, Any]) -> None:
    """Guards: an image that does not load, and lines that lie outside of it."""
    root = ElementTree.fromstring(chart.chart(found))
    lines = [each.get("points", "").split() for each in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == sum(len(panel.lines) for panel in chart.PANELS)
    assert {len(points) for points in lines} == {len(found["samples"])}
    across = [float(point.partition(",")[0]) for points in lines for point in points]
    assert min(across) >= chart.LEFT
    assert max(across) <= chart.WIDTH - chart.RIGHT + 0.1
    down = [float(point.partition(",")[2]) for points in lines for point in points]
    assert min(down) > 0
    assert max(down) < int(root.get("height", "0"))
    assert verify.NUMPY.keys() == exact.TORCH.keys()
