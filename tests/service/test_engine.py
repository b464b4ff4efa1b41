"""The engine on an event loop: coalescing, fairness, bounds, cancellation, deadlines, failures, order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmwire.wire import Tensor as WireTensor
from gemmwire_service.backends import Selection
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device, Job
from gemmwire_service.engine import Engine, State
from gemmwire_service.errors import DeadlineExceeded, DeviceFailed, Draining, NotReady, QueueFull
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.pipeline import Machine
from gemmwire_service.routes import Route, Routes
from gemmwire_service.stats import BatchTimes
from http_calls import datatype, raw
from oracle import assert_rows_close, reference, spread
from serving import hold

CPU = torch.device("cpu")
N, K = 64, 96


class Recording(Emulation):
    """The real emulation, which notes each forward and can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[tuple[PreparedWeight, int]] = []
        self.failing = False

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        self.forwards.append((weight, plan.bucket))
        if self.failing:
            raise RuntimeError("an illegal memory access was encountered")
        super().forward(x, weight, plan, out)


@dataclass
class Submitted:
    """A request at the engine, and the future of its answer."""

    item: Item
    future: asyncio.Future[Answer]

    def leave(self) -> None:
        self.item.leave()


@dataclass
class Rig:
    """An engine of layers 'a' and 'b' whose device can be held, so that requests wait."""

    engine: Engine
    backend: Recording
    weights: dict[str, Tensor]
    gate: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> None:
        """The device does nothing more until `release`."""
        self.gate.clear()
        hold(self.engine, self.gate)

    def release(self) -> None:
        self.gate.set()

    def submit(self, layer: str, x: Tensor, deadline: int | None = None) -> Submitted:
        tensor = WireTensor("x", datatype(x), tuple(x.shape), bytearray(raw(x)))
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def done(item: Item) -> None:
            if isinstance(item.outcome, Exception):
                future.set_exception(item.outcome)
            elif item.outcome is not None:
                future.set_result(item.outcome)

        arguments = (self.engine.layers[layer], tensor, x.shape[0], datatype(x), done, deadline)
        return Submitted(self.engine.submit(*arguments), future)

    def weight(self, layer: str) -> PreparedWeight:
        return self.engine.layers[layer].routes.by_bucket[1].weight

    async def answer(self, layer: str, x: Tensor) -> Tensor:
        return as_tensor(await self.submit(layer, x).future, x)


def as_tensor(answer: Answer, x: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(answer.data), dtype=x.dtype).view(x.shape[0], N)


@asynccontextmanager
async def rig(
    max_bucket: int = 16, max_queue: int = 64, max_queue_bytes: int = 1 << 20
) -> AsyncIterator[Rig]:
    backend = Recording()
    weights = {name: spread(N, K, seed=seed) for seed, name in enumerate("ab")}

    def load(device: Device) -> Iterable[Layer]:
        for name, weight in weights.items():
            prepared = backend.prepare(MxWeight.from_float(weight), CPU)
            by_bucket = {b: Route(backend, prepared, Plan(b)) for b in device.ladder.buckets}
            routes = Routes(Selection(backend, ()), by_bucket, ())
            yield Layer(LayerSpec(name, N, K, bias=False), routes, "test", "F32")

    engine = Engine(
        lambda report: Device(CPU, Ladder.up_to(max_bucket), report),
        load,
        max_queue=max_queue,
        max_queue_bytes=max_queue_bytes,
    )
    engine.start()
    while engine.state is State.LOADING:
        await asyncio.sleep(0.001)
    assert engine.failure is None, engine.failure
    with engine.device._turn:  # the load has told of its end, and is about to give the device up
        pass
    rig = Rig(engine, backend, weights)
    try:
        yield rig
    finally:
        rig.release()
        await engine.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_waiting_requests_of_a_layer_share_one_forward_and_each_gets_its_rows() -> None:
    async def test() -> None:
        async with rig() as r:
            xs = [
                spread(m, K, seed=m).to(dtype)
                for m, dtype in [(1, torch.bfloat16), (3, torch.float32), (2, torch.bfloat16)]
            ]
            r.hold()
            items = [r.submit("a", x) for x in xs]
            r.release()
            answers = [await item.future for item in items]
            assert [bucket for _, bucket in r.backend.forwards] == [8]
            assert {answer.bucket for answer in answers} == {8}
            for x, answer in zip(xs, answers, strict=True):
                assert_rows_close(as_tensor(answer, x), reference(x, r.weights["a"]))

    run(test)


def test_a_row_has_the_same_bits_whatever_shares_its_bucket() -> None:
    async def test() -> None:
        async with rig() as r:
            x = spread(5, K, seed=3)
            alone = await r.answer("a", x)  # bucket 8
            r.hold()
            first, second = r.submit("a", spread(2, K, seed=8) * float("nan")), r.submit("a", x)
            r.release()
            await first.future
            together = as_tensor(await second.future, x)
            assert r.backend.forwards[-1][1] == 8
            assert torch.equal(together, alone)

    run(test)


def test_a_batch_never_passes_the_largest_bucket() -> None:
    async def test() -> None:
        async with rig(max_bucket=4) as r:
            r.hold()
            items = [r.submit("a", spread(3, K, seed=seed)) for seed in range(3)]
            r.release()
            await asyncio.gather(*(item.future for item in items))
            assert [bucket for _, bucket in r.backend.forwards] == [4, 4, 4]

    run(test)


def test_rows_beyond_the_largest_bucket_go_in_chunks_of_one_request() -> None:
    async def test() -> None:
        async with rig(max_bucket=4) as r:
            x = spread(11, K, seed=2)
            y = await r.answer("a", x)
            assert [bucket for _, bucket in r.backend.forwards] == [4, 4, 4]
            assert_rows_close(y, reference(x, r.weights["a"]))

    run(test)


def test_a_busy_layer_does_not_starve_another() -> None:
    async def test() -> None:
        async with rig(max_bucket=1) as r:
            r.hold()
            busy = [r.submit("a", spread(1, K, seed=seed)) for seed in range(6)]
            other = r.submit("b", spread(1, K))
            r.release()
            await asyncio.gather(other.future, *(item.future for item in busy))
            served = [weight is r.weight("b") for weight, _ in r.backend.forwards]
            assert served.index(True) == 1, "b waits for one forward of a, not for all of them"

    run(test)


def test_a_cancelled_request_never_reaches_the_device() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            items = [r.submit("a", spread(1, K, seed=seed)) for seed in range(3)]
            for item in items:
                item.leave()
            r.release()
            await r.answer("b", spread(1, K))
            assert [weight for weight, _ in r.backend.forwards] == [r.weight("b")]
            assert (r.engine.waiting, r.engine.waiting_bytes) == (0, 0)

    run(test)


def test_a_deadline_that_passes_in_the_queue_is_answered_at_once_and_not_computed() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            item = r.submit("a", spread(1, K), time.monotonic_ns() + 300_000_000)
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(item.future, 10)  # the device is still held
            r.release()
            await r.answer("b", spread(1, K))
            assert len(r.backend.forwards) == 1
            assert r.engine.waiting == 0

    run(test)


def test_a_deadline_already_passed_is_refused() -> None:
    async def test() -> None:
        async with rig() as r:
            with pytest.raises(DeadlineExceeded):
                r.submit("a", spread(1, K), time.monotonic_ns() - 1)
            assert r.engine.waiting == 0

    run(test)


def test_the_queue_is_bounded_in_requests_and_recovers() -> None:
    async def test() -> None:
        async with rig(max_queue=3) as r:
            r.hold()
            items = [r.submit("a", spread(1, K)) for _ in range(3)]
            with pytest.raises(QueueFull, match="3"):
                r.submit("a", spread(1, K))
            r.release()
            await asyncio.gather(*(item.future for item in items))
            await r.answer("a", spread(1, K))

    run(test)


def test_the_queue_is_bounded_in_bytes_but_takes_one_request_of_any_size() -> None:
    async def test() -> None:
        async with rig(max_queue_bytes=K * 4) as r:
            await r.answer("a", spread(9, K))
            r.hold()
            item = r.submit("a", spread(1, K))
            with pytest.raises(QueueFull, match="bytes"):
                r.submit("a", spread(1, K))
            r.release()
            await item.future

    run(test)


def test_cancelled_requests_hold_their_place_until_the_device_drops_them() -> None:
    """Else a client that connects and leaves again and again would fill memory behind the bound's back."""

    async def test() -> None:
        async with rig(max_queue=2) as r:
            r.hold()
            for _ in range(2):
                r.submit("a", spread(1, K)).leave()
            with pytest.raises(QueueFull):
                r.submit("a", spread(1, K))

    run(test)


def test_a_device_failure_is_the_answer_of_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with rig() as r:
            r.backend.failing = True
            with pytest.raises(DeviceFailed, match="'a'"):
                await r.answer("a", spread(1, K))
            r.backend.failing = False
            x = spread(1, K)
            assert_rows_close(await r.answer("a", x), reference(x, r.weights["a"]))
            assert r.engine.layers["a"].stats.fail.count == 1

    run(test)
    assert "illegal memory access" in caplog.text


def test_a_job_runs_between_the_requests_before_and_after_it() -> None:
    async def test() -> None:
        async with rig(max_bucket=1) as r:
            seen: list[int] = []
            r.hold()
            before = [r.submit("a", spread(1, K)) for _ in range(2)]
            r.engine.post(Job(lambda: seen.append(len(r.backend.forwards))))
            after = r.submit("a", spread(1, K))
            r.release()
            await asyncio.gather(after.future, *(item.future for item in before))
            assert seen == [2]

    run(test)


def test_a_job_that_raises_does_not_end_the_device(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with rig() as r:
            r.engine.post(Job(lambda: 1 / 0))  # type: ignore[arg-type]
            await r.answer("a", spread(1, K))

    run(test)
    assert "ZeroDivisionError" in caplog.text


def test_a_device_that_cannot_be_set_up_fails_the_load() -> None:
    """Guards: a server that is loading for ever."""

    def broken() -> Machine:
        raise RuntimeError("no such device")

    async def test() -> None:
        ended = asyncio.Event()
        engine = Engine(
            lambda report: Device(torch.device("cpu"), Ladder.up_to(8), report, machine=broken),
            lambda device: [],
            max_queue=8,
            max_queue_bytes=1 << 20,
            on_loaded=lambda engine: ended.set(),
        )
        engine.start()
        await asyncio.wait_for(ended.wait(), 30)
        assert engine.state is State.FAILED
        assert "no such device" in str(engine.failure)
        await engine.stop()

    run(test)


def test_stopping_answers_what_waits_and_refuses_what_comes() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            x = spread(2, K)
            item = r.submit("a", x)
            stopping = asyncio.create_task(r.engine.stop())
            await asyncio.sleep(0)
            with pytest.raises(Draining):
                r.submit("a", x)
            r.release()
            await stopping
            assert_rows_close(as_tensor(await item.future, x), reference(x, r.weights["a"]))

    run(test)


def test_before_loading_has_ended_requests_are_refused() -> None:
    async def test() -> None:
        gate = threading.Event()

        def load(device: Device) -> Iterable[Layer]:
            gate.wait(30)
            return []

        engine = Engine(
            lambda report: Device(CPU, Ladder.up_to(1), report), load, max_queue=1, max_queue_bytes=1
        )
        engine.start()
        with pytest.raises(NotReady, match="loading"):
            engine.refuse_unless_ready()
        gate.set()
        await engine.stop()

    run(test)


def test_a_failed_load_is_a_state_with_its_reason() -> None:
    async def test() -> None:
        def load(device: Device) -> Iterable[Layer]:
            raise RuntimeError("no such file")

        ended = asyncio.Event()
        engine = Engine(
            lambda report: Device(CPU, Ladder.up_to(1), report),
            load,
            max_queue=1,
            max_queue_bytes=1,
            on_loaded=lambda _: ended.set(),
        )
        engine.start()
        await asyncio.wait_for(ended.wait(), 10)
        assert (engine.state, str(engine.failure)) == (State.FAILED, "no such file")
        with pytest.raises(NotReady, match="failed"):
            engine.refuse_unless_ready()
        await engine.stop()

    run(test)


def test_statistics_count_rows_and_batches() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            items = [r.submit("a", spread(m, K)) for m in (1, 2)]
            r.release()
            await asyncio.gather(*(item.future for item in items))
            await asyncio.sleep(0)
            stats: Any = r.engine.layers["a"].stats.document("a", 1)
            assert (stats["inference_count"], stats["execution_count"]) == (3, 1)
            assert stats["inference_stats"]["success"]["count"] == 2
            assert [batch["batch_size"] for batch in stats["batch_stats"]] == [4]
            assert stats["last_inference"] > 0

    run(test)


def test_requests_of_two_layers_in_one_turn_each_get_their_own_weights() -> None:
    async def test() -> None:
        async with rig() as r:
            x = spread(3, K, seed=5)
            items = {name: r.submit(name, x) for name in "ab"}
            for name, item in items.items():
                assert_rows_close(as_tensor(await item.future, x), reference(x, r.weights[name]))

    run(test)


def test_a_request_that_was_cancelled_or_has_expired_in_its_turn_is_not_computed() -> None:
    async def test() -> None:
        async with rig() as r:
            cancelled = r.submit("a", spread(1, K))
            cancelled.leave()
            late = r.submit("b", spread(1, K), time.monotonic_ns() + 20_000_000)
            time.sleep(0.03)  # as long as the turn of the event loop takes
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(late.future, 10)
            await r.answer("a", spread(1, K))
            await r.answer("b", spread(1, K))  # so that both lines of the device are through
            assert [weight for weight, _ in r.backend.forwards] == [r.weight("a"), r.weight("b")]
            assert r.engine.waiting == 0

    run(test)


def test_a_posted_job_is_never_overtaken_by_a_later_request() -> None:
    """Guards: a refit that was posted, and an answer after it from the weights before it."""

    async def test() -> None:
        async with rig() as r:
            for number in range(200):
                done: list[int] = []
                r.engine.post(Job(lambda done=done, number=number: done.append(number)))  # type: ignore[misc]
                await r.answer("a", spread(1, K))
                assert done == [number]

    run(test)


def test_stopping_answers_what_came_in_the_same_turn() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            x = spread(1, K)
            item = r.submit("a", x)
            r.release()
            await r.engine.stop()
            await asyncio.wait_for(item.future, 10)

    run(test)


def test_nothing_in_a_turn_is_lost_to_the_timer_of_one_of_its_requests() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            poison = r.submit("a", spread(1, K), time.monotonic_ns() + 10**30)
            others = [r.submit("a", spread(1, K)) for _ in range(3)]
            r.release()
            await asyncio.wait_for(asyncio.gather(*(item.future for item in others)), 10)
            assert poison.future.done()

    asyncio.run(_quiet(test))


async def _quiet(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """The event loop's report of the timer that could not be set is what the test provokes."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    await test()


def test_a_lone_request_is_computed_before_its_turn_ends() -> None:
    """Guards: a lone client that waits for a turn of the event loop, for company that does not come."""

    async def test() -> None:
        async with rig() as r:
            r.engine.alone = lambda: True
            assert r.submit("a", spread(1, K)).future.done()
            r.engine.alone = lambda: False
            item = r.submit("a", spread(1, K))
            assert not item.future.done()
            await item.future

    run(test)


def noted_threads(backend: Recording, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that its forwards run on, as they come."""
    threads: list[str] = []
    real = backend.forward

    def noting(*arguments: Any) -> None:
        threads.append(threading.current_thread().name)
        real(*arguments)

    monkeypatch.setattr(backend, "forward", noting)
    return threads


def test_a_large_matmul_is_left_to_the_device_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an event loop that answers nobody while it multiplies."""

    async def test() -> None:
        async with rig(max_bucket=4096) as r:
            threads = noted_threads(r.backend, monkeypatch)
            for m in (1, 4096):
                await r.answer("a", spread(m, K))
            assert threads == ["MainThread", "gemmwire-device"]

    run(test)


@pytest.mark.parametrize("alone", [False, True])
def test_a_forward_that_has_taken_long_is_left_to_the_device_thread(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an event loop that answers nobody for 40 ms at a time, on a processor that is slow at BF16."""

    async def test() -> None:
        async with rig() as r:
            r.engine.alone = lambda: alone
            threads = noted_threads(r.backend, monkeypatch)
            slow = BatchTimes(0, 0, 40_000_000, 0)
            r.engine.layers["a"].stats.count_batch(2, slow)
            for layer, m in (("a", 1), ("a", 2), ("b", 2)):
                await r.answer(layer, spread(m, K))
            assert threads == ["MainThread", "gemmwire-device", "MainThread"]

    run(test)


def test_a_chunked_request_runs_every_chunk_at_the_bucket_it_names_and_counts_them() -> None:
    async def test() -> None:
        async with rig(max_bucket=4) as r:
            answer = await r.submit("a", spread(9, K)).future
            assert answer.bucket == 4
            assert [bucket for _, bucket in r.backend.forwards] == [4, 4, 4]
            assert r.engine.layers["a"].stats.executions == 3

    run(test)


def test_a_chunked_request_whose_caller_has_left_stops_between_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with rig(max_bucket=1) as r:
            item = r.submit("a", spread(50, K))
            real = r.backend.forward

            def cancel() -> None:
                item.leave()

            def leaving(*arguments: Any) -> None:
                real(*arguments)
                if len(r.backend.forwards) == 2:
                    r.engine._call(cancel)
                    time.sleep(0.2)

            monkeypatch.setattr(r.backend, "forward", leaving)
            await r.answer("b", spread(1, K))
            assert len(r.backend.forwards) <= 4
            assert not item.future.done()

    run(test)


def test_a_failure_of_the_device_is_counted() -> None:
    async def test() -> None:
        async with rig() as r:
            r.hold()
            r.submit("a", spread(1, K)).leave()
            r.release()
            await r.answer("b", spread(1, K))
            assert r.engine.layers["a"].stats.fail.count == 1

    run(test)
