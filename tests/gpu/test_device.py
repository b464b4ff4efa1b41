"""The device thread on a GPU: graphs, staging, lent answers, jobs between batches, a device that is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Backend, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from on_device import Rig, eager, request, running, served_layer, tensor
from on_gpu import busy
from oracle import spread
from source_tree import ROOT

pytestmark = pytest.mark.gpu
LADDER = Ladder.up_to(256)
SHAPES = ((130, 384), (576, 341), (256, 1536))


@contextmanager
def served(
    backend: Backend, device: torch.device, ladder: Ladder = LADDER, budget: int = 1 << 30
) -> Iterator[tuple[Rig, list[Layer]]]:
    """Layers of SHAPES, captured; the last has a bias."""
    if device.type != "cuda":
        pytest.skip(
            "a rehearsal on a CPU has no graphs; tests/service/test_graphs.py tries them by stand-ins"
        )
    layers = []
    for n, k in SHAPES:
        bias = torch.linspace(-4, 4, n) if n == SHAPES[-1][0] else None
        weight = MxWeight.from_float(spread(n, k, seed=n), bias)
        layers.append(served_layer(f"{n}x{k}", backend, weight, device, ladder))
    with running(device, ladder, graph_budget=budget) as rig:
        rig.capture(*layers)
        yield rig, layers


def rows(m: int, layer: Layer, seed: int = 0) -> Tensor:
    return spread(m, layer.spec.k, seed=seed).to(torch.bfloat16)


def same(y: Tensor, expected: Tensor, what: str = "") -> None:
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), what


def test_every_bucket_is_a_graph_and_answers_as_the_eager_forward(
    backend: Backend, device: torch.device
) -> None:
    """Guards: a graph that differs from the calls it was made of, at any bucket and any m in it."""
    with served(backend, device) as (rig, layers):
        for layer in layers:
            assert layer.graphs is not None
            assert layer.graphs.eager == ()
            assert all(layer.has_graph(bucket) for bucket in LADDER.buckets)
            assert all(program.mail is not None for program in layer.programs.values() if program.small)
            for m in (1, 2, 3, 5, 8, 9, 64, 65, 200, 256):
                x = rows(m, layer, m)
                expected = eager(layer, x, LADDER.bucket_for(m), device)
                same(rig.infer(layer, x), expected, f"{layer.name}, m={m}")


def test_a_row_is_not_changed_by_what_was_there_before(backend: Backend, device: torch.device) -> None:
    """Guards: rows of an earlier request below m, NaN or large, that a replay still sees."""
    with served(backend, device) as (rig, layers):
        for layer in layers:
            x = rows(3, layer, 1)
            expected = rig.infer(layer, x).clone()
            for poison in (float("nan"), 448.0, float("inf"), 3e38):
                for m in (4, 8, 256):
                    rig.infer(layer, torch.full((m, layer.spec.k), poison, dtype=torch.bfloat16))
                    same(rig.infer(layer, x), expected, f"{layer.name} after {m} rows of {poison}")


def test_many_batches_under_way_each_get_their_own_rows(device: torch.device) -> None:
    """Guards: a slot, a static tensor or an outlet that one batch writes while another still reads it."""
    with served(Emulation(), device, Ladder((1, 2, 4, 8))) as (rig, layers):
        items, expected = [], []
        for number in range(600):
            layer, m = layers[number % 3], 1 + number % 7
            x = rows(m, layer, number)
            items.append(request(layer, x))
            expected.append((layer, x))
        answers = rig.answers(items)
        for item, answer, (layer, x) in zip(items, answers, expected, strict=True):
            same(tensor(answer, item), eager(layer, x, answer.bucket, device), f"{layer.name}, m={len(x)}")


def test_an_answer_is_not_written_to_while_somebody_holds_it(device: torch.device) -> None:
    """Guards: an answer that changes while it is being sent, because its pinned memory is used again."""
    layer = served_layer("a", Emulation(), MxWeight.from_float(spread(4096, 384)), device, LADDER)
    with running(device, LADDER) as rig:
        rig.capture(layer)
        kept = []
        for number in range(100):  # more than there is memory to lend
            item = request(layer, rows(16, layer, number))
            answer = rig.answers([item])[0]
            kept.append((item, answer, tensor(answer, item).clone()))
        for item, answer, was in kept:
            same(tensor(answer, item), was)
        for number in range(100):  # and what nobody holds is there again
            same(rig.infer(layer, rows(16, layer, number)), kept[number][2])


@pytest.mark.parametrize("datatype", ["FP16", "FP32"])
def test_other_datatypes_and_chunks(device: torch.device, datatype: str) -> None:
    dtype = {"FP16": torch.float16, "FP32": torch.float32}[datatype]
    with served(Emulation(), device) as (rig, layers):
        for layer in layers:
            for m in (3, 256, 700):
                x = rows(m, layer, m)
                bucket = LADDER.bucket_for(min(m, 256))
                parts = [eager(layer, part, bucket, device) for part in x.split(256)]
                assert torch.equal(rig.infer(layer, x.to(dtype), datatype), torch.cat(parts).to(dtype))


def test_steady_state_neither_allocates_nor_waits(device: torch.device) -> None:
    """Guards: a hidden copy, .item() or allocation in the path of every request."""
    with served(Emulation(), device) as (rig, layers):

        def items() -> list[Item]:
            return [request(layer, rows(m, layer, m)) for layer in layers for m in (1, 3, 16, 256)]

        rig.answers(items() + items())
        before = counters(device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its being a prototype
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(5):
                for item in items():
                    rig.answers([item])
            rig.answers(items() + items() + items())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert counters(device) == before


def counters(device: torch.device) -> dict[str, int]:
    """Allocations so far, of device and of pinned memory."""
    stats, host = torch.cuda.memory_stats(device), torch.cuda.host_memory_stats()
    names = ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: stats[name] for name in names} | {
        name: value for name, value in host.items() if "alloc" in name and "time" not in name
    }


def test_a_job_comes_between_the_batches_before_and_after_it(device: torch.device) -> None:
    """Guards: a refit that overtakes a batch under way, or is overtaken by the next."""
    layer = served_layer("a", Emulation(), MxWeight.from_float(spread(512, 384)), device, LADDER)
    other = Emulation().prepare(MxWeight.from_float(-spread(512, 384)), device)
    with running(device, LADDER) as rig:
        rig.capture(layer)
        live = layer.routes.by_bucket[1].weight
        x = rows(16, layer, 1)
        first = rig.infer(layer, x).clone()
        pair = [live.matrix, other.matrix]  # type: ignore[attr-defined]
        for number in range(20):
            source = pair[1].clone() if number % 2 == 0 else -pair[1].clone()
            before = [request(layer, x) for _ in range(4)]
            for item in before:
                rig.device.put(item)
            rig.job(partial(pair[0].copy_, source))
            after = request(layer, x)
            sign = 1 if number % 2 == 0 else -1
            for item in before:
                while id(item) not in rig.outcomes:
                    rig._take()
                same(tensor(rig.outcomes.pop(id(item)), item), sign * first, f"before job {number}")  # type: ignore[arg-type]
            same(tensor(rig.answers([after])[0], after), -sign * first, f"after job {number}")


def test_graphs_take_no_more_memory_than_they_say(device: torch.device) -> None:
    """Guards: a pool that grows with every bucket and layer."""
    backend = Emulation()  # its scratch memory is shared, and is no graph's
    layers = [
        served_layer(f"l{i}", backend, MxWeight.from_float(spread(1024, 1024, seed=i)), device, Ladder())
        for i in range(4)
    ]
    with running(device, Ladder()) as rig:
        rig.capture(layers[0])
        free = left(device)
        rig.capture(*layers[1:])
        taken = free - left(device)
        stated = sum(layer.graphs.nbytes for layer in layers[1:] if layer.graphs is not None)
        print(f"3 layers of {len(Ladder().buckets)} graphs: {taken} bytes taken, {stated} stated")
        assert taken <= stated + (2 << 20)


def left(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


class Waits(Emulation):
    """Cannot be captured at M=8: its forward asks for a number."""

    def forward(self, x: Tensor, weight: PreparedWeight, plan: Plan, out: Tensor) -> None:
        if plan.bucket == 8:
            x.sum().item()
        super().forward(x, weight, plan, out)


def test_a_bucket_that_cannot_be_captured_is_served_without(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: one operation that waits, which costs the layer or the process; a silent fallback."""
    with served(Waits(), device) as (rig, layers):
        for layer in layers:
            assert layer.graphs is not None
            assert [each.bucket for each in layer.graphs.eager] == [8]
            for m in (4, 7, 16):
                x = rows(m, layer, m)
                same(rig.infer(layer, x), eager(layer, x, LADDER.bucket_for(m), device))
    assert "M=8: runs without a CUDA graph" in caplog.text
    assert "operation not permitted when stream is capturing" in caplog.text


def test_another_thread_may_allocate_while_layers_load(device: torch.device) -> None:
    """Guards: a capture that the preparation of a refit invalidates, and a thread poisoned by a capture."""
    weight = MxWeight.from_float(spread(512, 512))
    with busy(lambda: Emulation().prepare(weight, device)), served(Emulation(), device) as (rig, layers):
        for layer in layers:
            assert layer.graphs is not None
            assert layer.graphs.eager == ()
            same(rig.infer(layer, rows(5, layer)), eager(layer, rows(5, layer), 8, device))


def test_the_event_loop_may_see_to_a_quick_batch_itself(device: torch.device) -> None:
    """Guards: a context that is not current on the thread."""
    with served(Emulation(), device) as (rig, layers):
        sent: list[Item] = []
        for number in range(300):
            layer = layers[number % 3]
            item = request(layer, rows(1 + number % 7, layer, number))
            assert rig.device.quick([item])
            if rig.device.full:
                first, done = sent.pop(0), rig.device.receive_now(wait=True)
                assert done is not None
                (answer,) = done.outcomes
                assert isinstance(answer, Answer), answer
                x = tensor_of(first)
                same(tensor(answer, first), eager(first.layer, x, answer.bucket, device))
            assert rig.device.start_now([item]) is None
            sent.append(item)
        while rig.device.receive_now(wait=True) is not None:
            pass


def tensor_of(item: Item) -> Tensor:
    return torch.frombuffer(item.x.data, dtype=torch.bfloat16).view(item.rows, -1)


def test_over_the_budget_there_are_fewer_graphs_and_the_same_answers(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with served(Emulation(), device, budget=1) as (rig, layers):
        assert not all(layer.has_graph(bucket) for layer in layers for bucket in LADDER.buckets)
        for layer in layers:
            same(rig.infer(layer, rows(5, layer)), eager(layer, rows(5, layer), 8, device))
    assert "--graph-budget-bytes" in caplog.text


LOST = """
import torch
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer, Item
from gemmwire_service.buckets import Ladder
from gemmwire_service.errors import DeviceLost
from gemmwire_service.mxfp8.weight import MxWeight
from on_device import request, running, served_layer
device = torch.device("cuda", 0)
layer = served_layer("a", Emulation(), MxWeight.from_float(torch.ones(256, 256)), device, Ladder((8,)))
x = torch.ones(8, 256, dtype=torch.bfloat16)
def poison():
    torch.zeros(4, device=device)[torch.tensor([1 << 20], device=device)]  # fails on the device, later
with running(device, Ladder((8,))) as rig:
    rig.capture(layer)
    rig.infer(layer, x)
    rig.job(poison)
    outcomes = rig.outcomes_of([request(layer, x) for _ in range(50)])
    assert all(isinstance(outcome, DeviceLost) for outcome in outcomes), outcomes
    assert rig.device.lost is not None
print("told:", outcomes[0], flush=True)
"""


def test_a_lost_device_is_told_to_all_that_wait(device: torch.device) -> None:
    """Guards: a process that answers errors for hours, or hangs, after one illegal access."""
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "service", "tests"))
    done = subprocess.run(
        [sys.executable, "-c", LOST],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "told: cuda:0 is lost to the server" in done.stdout, done.stdout + done.stderr
