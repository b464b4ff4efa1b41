"""Refit under graphs: which weight a replay reads, what stays where it was, what a failure leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import gemmwire_service.backends.storage as storage
from gemmwire_service.backends.base import Backend
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.checkpoint.float_layer import quantize_layer
from gemmwire_service.device import Device
from gemmwire_service.engine import Engine, State
from gemmwire_service.errors import DeviceFailed, WeightsRefused
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.refit import Refit, Refitted, Source
from on_device import eager, request, served_layer, tensor
from on_gpu import sized
from oracle import spread

LADDER = Ladder.up_to(sized(256, 16))
N, K = 130, 384
REFITS, FORWARDS = sized(20, 3), sized(200, 12)


def weight(seed: int) -> Tensor:
    return spread(N, K, seed=seed) / 2**14


def bias(seed: int) -> Tensor:
    return torch.linspace(-4, 4, N) * (1 + seed)


@dataclass
class Rig:
    """A served layer, in version 1 of weight(0)."""

    engine: Engine
    layer: Layer
    backend: Backend
    device: torch.device
    refits: Refit

    async def refit(self, seed: int) -> Refitted:
        read = partial(quantize_layer, self.layer.name, weight(seed), bias(seed))
        return await self.refits.refit(Source(self.layer, read, "test"))

    async def answer(self, x: Tensor) -> tuple[Answer, Tensor]:
        future: asyncio.Future[Item] = asyncio.get_running_loop().create_future()
        item = request(self.layer, x)
        sent = self.engine.submit(self.layer, item.x, len(x), "BF16", future.set_result)
        await asyncio.wait_for(future, 60)
        if not isinstance(sent.outcome, Answer):
            raise sent.outcome or AssertionError("the request was dropped")
        return sent.outcome, tensor(sent.outcome, sent).clone()

    def alone(self, seed: int) -> Layer:
        """A layer of its own with this weight."""
        prepared = MxWeight.from_float(weight(seed), bias(seed))
        return served_layer("alone", self.backend, prepared, self.device, LADDER)


@asynccontextmanager
async def serving(backend: Backend, device: torch.device) -> AsyncIterator[Rig]:
    first = MxWeight.from_float(weight(0), bias(0))
    layer = served_layer("l", backend, first, device, LADDER)

    def load(on: Device) -> Iterable[Layer]:
        on.capture(layer)
        on.allocate()
        return [layer]

    engine = Engine(
        lambda report: Device(device, LADDER, report), load, max_queue=4096, max_queue_bytes=1 << 30
    )
    engine.start()
    try:
        while engine.state is State.LOADING:
            await asyncio.sleep(0.01)
        if engine.failure is not None:
            raise engine.failure
        yield Rig(engine, layer, backend, device, Refit(engine))
    finally:
        await engine.stop()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def rows(m: int, seed: int = 0) -> Tensor:
    return spread(m, K, seed=seed).to(torch.bfloat16)


def same(y: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), what


def test_every_answer_is_that_of_the_version_it_names(backend: Backend, device: torch.device) -> None:
    """Guards: a batch under way that is computed with one weight and marked with the next."""

    async def check() -> None:
        async with serving(backend, device) as rig:
            alone = [rig.alone(seed) for seed in range(REFITS + 1)]
            versions: set[int] = set()
            refitting = True
            count = 0

            async def ask(number: int) -> None:
                nonlocal count
                while refitting or count < FORWARDS:
                    x = rows(1 + (number + count) % 5, number)
                    answer, y = await rig.answer(x)
                    expected = eager(alone[answer.version - 1], x, answer.bucket, device)
                    same(y, expected, f"version {answer.version}, bucket {answer.bucket}")
                    versions.add(answer.version)
                    count += 1

            asking = [asyncio.create_task(ask(number)) for number in range(8)]
            for seed in range(1, REFITS + 1):
                assert (await rig.refit(seed)).version == seed + 1
            refitting = False
            await asyncio.gather(*asking)
            assert len(versions) > 1
            answer, y = await rig.answer(rows(3))
            same(y, eager(alone[-1], rows(3), answer.bucket, device), "the last version")

    run(check())


def test_every_bucket_reads_the_new_weight(backend: Backend, device: torch.device) -> None:
    """Guards: a graph that holds something made from the weight that was there when it was captured."""

    async def check() -> None:
        async with serving(backend, device) as rig:
            await rig.refit(1)
            alone = rig.alone(1)
            for bucket in LADDER.buckets:
                answer, y = await rig.answer(rows(bucket, bucket))
                assert (answer.bucket, answer.version) == (bucket, 2)
                same(y, eager(alone, rows(bucket, bucket), bucket, device), f"bucket {bucket}")

    run(check())


def memory(device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return ()
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.current")
    return tuple(stats[name] for name in names)


def test_ten_refits_leave_addresses_graphs_and_memory_as_they_were(
    backend: Backend, device: torch.device
) -> None:
    """Guards: a fresh staging buffer each time; storage that moves; a graph captured anew."""

    async def check() -> None:
        async with serving(backend, device) as rig:
            forms = {id(r.weight): r.weight for r in rig.layer.routes.by_bucket.values()}
            held = [tensor for form in forms.values() for tensor in storage.tensors(form)]
            addresses = [0 if t.is_mkldnn else t.data_ptr() for t in held]
            programs = dict(rig.layer.programs)
            await rig.refit(1)  # what is allocated once: the staging of one layer, the trial's rows
            before = memory(device)
            for seed in range(2, 11):
                await rig.refit(seed)
            assert memory(device) == before, "allocated, reserved, segments"
            assert [0 if t.is_mkldnn else t.data_ptr() for t in held] == addresses
            assert rig.layer.programs == programs
            assert all(rig.layer.has_graph(b) for b in LADDER.buckets) or device.type != "cuda"

    run(check())


@pytest.mark.gpu
def test_a_refit_takes_one_copy_of_the_layer_and_little_more(device: torch.device) -> None:
    """Guards: the new weight on the device twice or three times while it is prepared."""
    n, k = 32768, 4096
    backend = Emulation()

    async def check() -> None:
        layer = served_layer("l", backend, MxWeight.from_float(torch.zeros(n, k)), device, Ladder((8,)))

        def load(on: Device) -> Iterable[Layer]:
            on.capture(layer)
            on.allocate()
            return [layer]

        engine = Engine(
            lambda report: Device(device, Ladder((8,)), report), load, max_queue=8, max_queue_bytes=1 << 30
        )
        engine.start()
        while engine.state is State.LOADING:
            await asyncio.sleep(0.01)
        refits = Refit(engine)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        w = torch.randn(n, k) / 64
        await refits.refit(Source(layer, partial(quantize_layer, "l", w, None), "test"))
        peak = torch.cuda.max_memory_allocated(device) - before
        await engine.stop()
        form = storage.nbytes(layer.routes.by_bucket[8].weight)
        print(f"a layer of {form >> 20} MiB: {peak >> 20} MiB more at the peak of its refit")
        assert peak <= form + (64 << 20)

    run(check())


@pytest.mark.parametrize("piece", [0, 1])
def test_a_failure_in_the_exchange_leaves_the_old_weight_in_the_graphs(
    backend: Backend, device: torch.device, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a weight of two halves behind a graph that nobody looks at again."""
    real, calls = storage.swap, iter(range(1000))

    def swap(old: Tensor, new: Tensor) -> None:
        if next(calls) == piece:
            raise RuntimeError("copying")
        real(old, new)

    async def check() -> None:
        async with serving(backend, device) as rig:
            before = [(await rig.answer(rows(bucket)))[1] for bucket in LADDER.buckets]
            monkeypatch.setattr(storage, "PIECE", 1 << 10)
            monkeypatch.setattr(storage, "swap", swap)
            with pytest.raises(DeviceFailed, match="version 1 is still served, bit for bit"):
                await rig.refit(1)
            for bucket, y in zip(LADDER.buckets, before, strict=True):
                answer, now = await rig.answer(rows(bucket))
                assert answer.version == 1
                same(now, y, f"bucket {bucket}")
            await rig.refit(1)
            assert rig.layer.version == 2

    run(check())


def test_a_weight_that_is_not_the_layer_s_is_refused(backend: Backend, device: torch.device) -> None:
    async def check() -> None:
        async with serving(backend, device) as rig:
            for other, b in (
                (spread(N, K), None),
                (spread(N + 1, K), torch.ones(N + 1)),
                (spread(N, 32), bias(0)),
            ):
                with pytest.raises(WeightsRefused, match="replaced in place"):
                    await rig.refits.refit(Source(rig.layer, partial(quantize_layer, "l", other, b), "test"))
            assert rig.layer.version == 1

    run(check())
