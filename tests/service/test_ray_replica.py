"""A replica as Ray drives it, without Ray: when it is healthy, what it answers, how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from exact_layer_versions import LAYER, X, checkpoint
from gemmwire_service.access import Access
from gemmwire_service.engine import State
from gemmwire_service.errors import DeviceLost, NotReady
from gemmwire_service.ray_ingress import Bounds, Distributor, Part
from gemmwire_service.ray_replica import Asked, Front, PartReplica, Told, ask
from gemmwire_service.settings import Settings
from http_calls import HEADER_LENGTH, message
from keyed import drawn
from serving import settings

T = TypeVar("T")

BOUNDS = Bounds(body=10_000, weights=20_000, all=100_000)
INDEX = Asked("POST", "/v2/repository/index", b"", [])


class Ended(PartReplica):
    """One that Python, which awaits nothing, does not end once more."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


def run(options: Settings, use: Callable[[PartReplica], Awaitable[T]]) -> T:
    """What `use` makes of a replica that has begun."""

    async def whole() -> T:
        replica = Ended(options.model_dump(), several=True)
        await replica._begun
        try:
            return await use(replica)
        finally:
            await PartReplica.__del__(replica)

    return asyncio.run(whole())


def infer(layer: str = LAYER, m: int = 1) -> Asked:
    body, length = message(X[:1].repeat(m, 1).bfloat16())
    headers = [
        (b"content-length", b"%d" % len(body)),
        (HEADER_LENGTH.lower().encode(), b"%d" % length),
    ]
    return Asked("POST", f"/v2/models/{layer}/infer", b"", headers, body)


def document(told: Told) -> dict[str, object]:
    loaded: dict[str, object] = json.loads(told.body)
    return loaded


def test_it_is_healthy_once_its_layers_are_loaded(tmp_path: Path) -> None:
    async def use(replica: PartReplica) -> tuple[State, Told]:
        await replica.check_health()
        return replica._engine.state, await replica.ask(infer())

    state, told = run(settings(model=(checkpoint(tmp_path),)), use)
    assert state is State.READY
    assert told.status == 200


def test_what_could_not_be_loaded_is_what_its_health_says(tmp_path: Path) -> None:
    """Guards: a deployment that stays `starting`, with the reason in a log of some node."""

    async def use(replica: PartReplica) -> None:
        with pytest.raises(RuntimeError, match="no such file"):
            await replica.check_health()

    run(settings(model=(str(tmp_path / "none.safetensors"),)), use)


def test_a_lost_device_ends_its_health() -> None:
    """Guards: a replica that answers 503 for ever, and that nobody replaces."""

    async def use(replica: PartReplica) -> None:
        await replica.check_health()
        replica._engine._device_lost(DeviceLost("The device is gone"))
        with pytest.raises(RuntimeError, match="The device is gone"):
            await replica.check_health()
        assert (await replica.ask(infer())).status == 503

    run(settings(random_layer=(f"{LAYER}=64x128",)), use)


def test_weights_that_it_cannot_take_over_end_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a replica that serves an old version for ever."""
    monkeypatch.setattr("gemmwire_service.shared_refit._RETRY_S", 0.01)
    monkeypatch.setattr("gemmwire_service.shared_refit.PERIOD_S", 0.01)

    async def use(replica: PartReplica) -> None:
        await replica.check_health()
        (tmp_path / f"{LAYER}@2.safetensors").write_bytes(b"cut")
        while replica._behind is None:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match=f"{LAYER}@2"):
            await replica.check_health()

    run(settings(random_layer=(f"{LAYER}=64x128",), refit_dir=str(tmp_path)), use)


@pytest.mark.parametrize("m", [1, 600], ids=["joined", "in-parts"])
def test_a_body_is_bytes_whatever_its_size(m: int) -> None:
    """Guards: answers from 64 KiB on, which are views of buffers and which Ray cannot carry."""

    async def use(replica: PartReplica) -> Told:
        await replica.check_health()
        return await replica.ask(infer(m=m))

    told = run(settings(random_layer=(f"{LAYER}=64x128",)), use)
    assert told.status == 200
    assert type(told.body) is bytes
    assert len(told.body) > m * 64 * 2


def test_one_of_several_does_not_answer_metrics_for_all() -> None:
    """Guards: counters that jump between replicas from one scrape to the next."""

    async def use(replica: PartReplica) -> tuple[Told, Told]:
        asked = Asked("GET", "/metrics", b"", [])
        alone = Front(replica._front.service, several=False)
        return await replica.ask(asked), await ask(alone, asked)

    several, one = run(settings(random_layer=(f"{LAYER}=64x128",)), use)
    assert (several.status, document(several)["code"]) == (404, "route_unknown")
    assert one.status == 200
    assert b"gemmwire" in one.body


def test_a_weight_for_one_of_several_is_refused_unless_they_share_it(tmp_path: Path) -> None:
    """Guards: replicas whose weights differ, each under version 1 or 2 of its own."""
    put = Asked("PUT", f"/v2/repository/models/{LAYER}/weights", b"", [(b"content-length", b"0")])

    async def use(replica: PartReplica) -> Told:
        await replica.check_health()
        return await replica.ask(put)

    refused = run(settings(random_layer=(f"{LAYER}=64x128",)), use)
    assert (refused.status, document(refused)["code"]) == (400, "refit_unshared")
    shared = run(settings(random_layer=(f"{LAYER}=64x128",), refit_dir=str(tmp_path)), use)
    assert document(shared)["code"] == "weights_invalid"


def test_a_part_that_is_gone_is_a_503_of_its_layers_alone() -> None:
    """Guards: one part's failure that ends the answers of the others."""

    class Gone:
        async def layers(self) -> list[str]:
            return ["gone"]

        async def ask(self, asked: Asked) -> Told:
            raise NotReady("The part is gone")

    async def use(replica: PartReplica) -> list[Told]:
        await replica.check_health()
        distributor = Distributor([Gone(), replica], Access(), BOUNDS)
        await distributor.find_out()
        return [await ask(distributor, each) for each in (infer("gone"), infer(), INDEX)]

    lost, kept, index = run(settings(random_layer=(f"{LAYER}=64x128",)), use)
    assert (lost.status, document(lost)["code"], kept.status) == (503, "not_ready", 200)
    assert dict(lost.headers)[b"retry-after"] == b"1"
    assert index.status == 503  # a list without the layers of a part would say that there are none


class Noted:
    """A part that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.go = asyncio.Event()

    async def layers(self) -> list[str]:
        return [LAYER]

    async def ask(self, asked: Asked) -> Told:
        self.asked.append(asked)
        await self.go.wait()
        return Told(200, [], b"")


async def distributor_of(part: Part, access: Access, bounds: Bounds) -> Distributor:
    distributor = Distributor([part], access, bounds)
    await distributor.find_out()
    return distributor


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        pytest.param(infer("none"), 404, "layer_unknown", id="layer"),
        pytest.param(infer(m=100), 413, "body_too_large", id="body"),
        pytest.param(Asked("GET", "/metrics", b"", []), 404, "route_unknown", id="route"),
    ],
)
def test_what_goes_nowhere_is_refused_by_its_head(asked: Asked, status: int, code: str) -> None:
    """Guards: memory of the ingress that requests fill which no part will take."""

    async def whole() -> Told:
        part = Noted()
        told = await ask(await distributor_of(part, Access(), BOUNDS), asked)
        assert part.asked == []
        return told

    told = asyncio.run(whole())
    assert (told.status, document(told)["code"]) == (status, code)


def test_who_has_no_key_is_refused_by_the_ingress(tmp_path: Path) -> None:
    """Guards: bodies that are read, and passed on, for nobody in particular."""
    keys = drawn(tmp_path)

    async def whole() -> list[int]:
        part = Noted()
        part.go.set()
        distributor = await distributor_of(part, Access(str(keys.path)), BOUNDS)
        shown = infer()
        shown.headers.append((b"authorization", b"Bearer " + keys.infer.encode()))
        return [(await ask(distributor, each)).status for each in (infer(), shown)]

    assert asyncio.run(whole()) == [401, 200]


def test_bodies_on_their_way_have_one_bound_together() -> None:
    """Guards: an ingress that many clients fill while the parts are busy."""

    async def whole() -> list[int]:
        part = Noted()
        size = len(infer().body)
        distributor = await distributor_of(part, Access(), Bounds(BOUNDS.body, BOUNDS.weights, 2 * size))
        under_way = [asyncio.ensure_future(ask(distributor, infer())) for _ in range(2)]
        while len(part.asked) < 2:
            await asyncio.sleep(0)
        refused = await ask(distributor, infer())
        part.go.set()
        await asyncio.gather(*under_way)
        return [refused.status, (await ask(distributor, infer())).status]

    assert asyncio.run(whole()) == [503, 200]
