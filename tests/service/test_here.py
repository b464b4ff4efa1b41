"""Batches that the event loop sends to the device itself, without a GPU: who gets what, and in what order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device, Job
from gemmwire_service.engine import Engine, State
from gemmwire_service.errors import DeviceLost, NotReady
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.pipeline import Machine
from on_device import eager, request, served_layer, tensor
from oracle import spread
from scripted_cuda import ScriptedStreams, machine

CPU = torch.device("cpu")
LADDER = Ladder((1, 2, 4, 8))


@dataclass
class Rig:
    engine: Engine
    layers: dict[str, Layer]
    streams: ScriptedStreams
    failures: list[Exception | None] = field(default_factory=list)

    async def infer(self, layer: str, x: Tensor) -> tuple[Item, Answer]:
        done: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        wire = request(self.layers[layer], x).x
        item = self.engine.submit(self.layers[layer], wire, len(x), "BF16", done.set_result)
        await asyncio.wait_for(done, 20)
        if isinstance(item.outcome, Exception):
            raise item.outcome
        assert isinstance(item.outcome, Answer)
        return item, item.outcome


@asynccontextmanager
async def rig(took: float = 20.0, seed: int = 0) -> AsyncIterator[Rig]:
    """Layers 'a', 'b' and 'slow', which the event loop does not see to, on a device that runs late."""
    made: list[Machine] = []
    failures: list[Exception | None] = []
    layers: dict[str, Layer] = {}

    def make() -> Machine:
        made.append(machine(LADDER, seed=seed, mail=seed % 2 == 1, took=took))
        return made[0]

    def load(device: Device) -> Iterable[Layer]:
        for number, name in enumerate(("a", "b", "slow")):
            weight = MxWeight.from_float(spread(34, 96, seed=number))
            layers[name] = served_layer(name, Emulation(), weight, CPU, LADDER)
            device.capture(layers[name])
        for program in layers["slow"].programs.values():
            program.microseconds = 1e6
        device.allocate()
        return layers.values()

    engine = Engine(
        lambda report: Device(CPU, LADDER, report, machine=make),
        load,
        max_queue=1000,
        max_queue_bytes=1 << 20,
        on_loaded=lambda engine: failures.append(engine.failure),
    )
    engine.start()
    while engine.state is State.LOADING:
        await asyncio.sleep(0.001)
    assert engine.failure is None, engine.failure
    streams = made[0].streams
    assert isinstance(streams, ScriptedStreams)
    streams.lazy = True
    try:
        yield Rig(engine, layers, streams, failures)
    finally:
        await engine.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def rows(m: int, seed: int = 0) -> Tensor:
    return spread(m, 96, seed=seed).to(torch.bfloat16)


def check(item: Item, answer: Answer, x: Tensor) -> None:
    expected = eager(item.layer, x, answer.bucket, CPU)
    assert torch.equal(tensor(answer, item), expected), f"{item.layer.name}, m={len(x)}"


@pytest.mark.parametrize("seed", range(5))
def test_every_request_gets_its_rows_whoever_sends_it(seed: int) -> None:
    """Guards: the event loop and the thread in the staging at one time; an answer that is never given."""

    async def test() -> None:
        generator = random.Random(seed)
        async with rig(seed=seed) as r:

            async def client(number: int) -> None:
                for turn in range(12):
                    x = rows(generator.randint(1, 8), seed=100 * number + turn)
                    name = generator.choice(["a", "a", "a", "b", "slow"])
                    check(*await r.infer(name, x), x)

            await asyncio.gather(*(client(number) for number in range(10)))
            assert r.engine.waiting == r.engine._here.count == 0

    run(test)


def test_requests_that_come_while_three_are_under_way_share_a_forward() -> None:
    async def test() -> None:
        async with rig() as r:
            r.engine.alone = lambda: True  # each is passed on at once
            answers = await asyncio.gather(*(r.infer("a", rows(1, seed)) for seed in range(11)))
            assert [answer.bucket for _, answer in answers] == [1, 1, 1, *[8] * 8]

    run(test)


def test_a_job_comes_after_what_is_under_way_here_and_before_what_follows() -> None:
    """Guards: a refit under a forward that the event loop has sent; an answer of the wrong version."""

    async def test() -> None:
        async with rig() as r:
            for number in range(30):
                tasks = [asyncio.create_task(r.infer("a", rows(2, seed))) for seed in range(5)]
                await asyncio.sleep(0)
                before = r.layers["a"].version

                def bump() -> None:
                    assert not any(r.streams._queues.values())
                    r.layers["a"].version += 1

                r.engine.post(Job(bump))
                after = asyncio.create_task(r.infer("a", rows(2, 7)))
                assert {answer.version for _, answer in await asyncio.gather(*tasks)} == {before}, number
                assert (await after)[1].version == before + 1

    run(test)


def test_stopping_answers_what_is_under_way() -> None:
    async def test() -> None:
        async with rig() as r:
            tasks = [asyncio.create_task(r.infer(name, rows(3))) for name in ("a", "b", "a", "slow")]
            await asyncio.sleep(0)
            await r.engine.stop()
            for item, answer in await asyncio.gather(*tasks):
                check(item, answer, rows(3))

    run(test)


def test_what_the_caller_has_left_is_not_sent() -> None:
    async def test() -> None:
        async with rig() as r:
            copies = r.streams.copies
            item = r.engine.submit(
                r.layers["a"], request(r.layers["a"], rows(1)).x, 1, "BF16", lambda item: None
            )
            item.leave()
            await asyncio.sleep(0.01)
            assert r.streams.copies == copies
            assert r.engine.waiting == 0

    run(test)


def test_a_lost_device_is_told_to_all_and_the_engine_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    """Guards: requests that wait for ever, and a server that stays ready."""

    async def test() -> None:
        async with rig() as r:
            r.streams.failing = torch.AcceleratorError("an illegal memory access was encountered")
            tasks = [asyncio.create_task(r.infer("a", rows(1))) for _ in range(20)]
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, DeviceLost) for each in found), found
            assert r.engine.state is State.FAILED
            assert isinstance(r.engine.failure, DeviceLost)
            assert r.failures == [None, r.engine.failure]
            with pytest.raises(NotReady):
                r.engine.refuse_unless_ready()
            assert r.engine.waiting == r.engine._here.count == 0

    run(test)
