"""Batches on three streams and the memory that they pass through, without a GPU: streams that run late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backlog import Answer
from gemmwire_service.buckets import Ladder
from gemmwire_service.errors import DeviceLost
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.pipeline import Machine
from on_device import Rig, eager, request, running, served_layer, tensor
from oracle import spread
from scripted_cuda import ScriptedStreams, machine

CPU = torch.device("cpu")
LADDER = Ladder((1, 2, 4, 8))
SHAPES = ((34, 96), (64, 33), (96, 128))


@contextmanager
def served(
    seed: int = 0,
    ladder: Ladder = LADDER,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    mail: bool = False,
) -> Iterator[tuple[Rig, list[Layer], ScriptedStreams]]:
    """Layers behind a device whose streams run late."""
    layers = [
        served_layer(f"{n}x{k}", Emulation(), MxWeight.from_float(spread(n, k, seed=n)), CPU, ladder)
        for n, k in shapes
    ]
    made: list[Machine] = []

    def make() -> Machine:
        made.append(machine(ladder, seed=seed, mail=mail))
        return made[0]

    with running(CPU, ladder, machine=make) as rig:
        rig.capture(*layers)
        streams = made[0].streams
        assert isinstance(streams, ScriptedStreams)
        streams.lazy = True
        yield rig, layers, streams


def rows(m: int, layer: Layer, seed: int = 0) -> Tensor:
    return spread(m, layer.spec.k, seed=seed).to(torch.bfloat16)


def same(y: Tensor, expected: Tensor, what: str = "") -> None:
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), what


@pytest.mark.parametrize("mail", [False, True], ids=["copied", "mailed"])
@pytest.mark.parametrize("seed", range(8))
def test_batches_under_way_each_get_their_own_rows(seed: int, mail: bool) -> None:
    """Guards: a missing event between two streams, or memory that two batches use at one time."""
    generator = random.Random(seed)
    with served(seed, mail=mail) as (rig, layers, _):
        for _ in range(3):
            items, expected = [], []
            for number in range(60):
                layer, m = generator.choice(layers), generator.randint(1, 8)
                x = rows(m, layer, number)
                items.append(request(layer, x, generator.choice(["BF16", "BF16", "FP32"])))
                expected.append(x)
            for item, answer, x in zip(items, rig.answers(items), expected, strict=True):
                y = eager(item.layer, x, answer.bucket, CPU)
                got = tensor(answer, item)
                assert torch.equal(got, y.to(got.dtype)), f"seed {seed}, {item.layer.name}, m={len(x)}"


@pytest.mark.parametrize("mail", [False, True], ids=["copied", "mailed"])
@pytest.mark.parametrize("seed", range(4))
def test_chunks(seed: int, mail: bool) -> None:
    with served(seed, mail=mail) as (rig, layers, _):
        for layer in layers:
            x = rows(43, layer, seed)
            expected = torch.cat([eager(layer, part, 8, CPU) for part in x.split(8)])
            same(rig.infer(layer, x), expected, layer.name)


def test_a_job_runs_when_nothing_is_under_way() -> None:
    """Guards: a refit that changes the weight under a batch that still computes."""
    with served() as (rig, layers, streams):
        items = [request(layers[0], rows(3, layers[0], number)) for number in range(20)]
        for item in items:
            rig.device.put(item)
        left: list[int] = []
        rig.job(lambda: left.append(sum(map(len, streams._queues.values()))))
        assert left == [0]
        assert all(isinstance(answer, Answer) for answer in outcomes(rig, 20))


def outcomes(rig: Rig, count: int) -> list[object]:
    while len(rig.outcomes) < count:
        rig._take()
    return list(rig.outcomes.values())


LARGE = ((8192, 96),)  # 16 KiB of y a row


def test_an_answer_that_is_held_does_not_change_and_holds_up_nobody() -> None:
    """Guards: pinned memory that is written again while it is sent; a client that does not read, and with it
    the end of all answers."""
    with served(shapes=LARGE) as (rig, (layer,), _):
        held = []
        for number in range(60):  # more than there are outlets
            item = request(layer, rows(4, layer, number))
            answer = rig.answers([item])[0]
            held.append((item, answer, tensor(answer, item).clone()))
        for item, answer, was in held:
            same(tensor(answer, item), was)


def test_memory_comes_back_once_an_answer_is_dropped() -> None:
    """Guards: outlets that are lent for ever, after which every answer is a copy."""
    with served(shapes=LARGE) as (rig, (layer,), _):
        seen = set()
        for number in range(200):
            item = request(layer, rows(4, layer, number))
            answer = rig.answers([item])[0]
            y = tensor(answer, item)
            seen.add(y.data_ptr())
            del y, answer
            item.outcome = None
        assert len(seen) <= 64


def test_a_part_of_an_answer_keeps_its_memory() -> None:
    """Guards: a batch whose first answer is sent, which frees the memory of its second."""
    with served(shapes=LARGE) as (rig, (layer,), _):
        items = [request(layer, rows(2, layer, number)) for number in range(4)]
        kept = tensor(rig.answers(items)[3], items[3])
        was = kept.clone()
        for number in range(100):
            rig.infer(layer, rows(8, layer, number))
        same(kept, was)


@pytest.mark.parametrize("mail", [False, True], ids=["copied", "mailed"])
def test_a_batch_that_fails_gives_its_memory_back(mail: bool) -> None:
    """Guards: a server that stops after as many failures as it has slots."""
    with served(mail=mail) as (rig, layers, streams):
        x = rows(3, layers[0])
        for _ in range(10):
            streams.failing = RuntimeError("not this time")
            (outcome,) = rig.outcomes_of([request(layers[0], x)])
            assert isinstance(outcome, RuntimeError)
        same(rig.infer(layers[0], x), eager(layers[0], x, 4, CPU))


def test_a_lost_device_fails_what_is_under_way_and_what_comes() -> None:
    """Guards: requests that wait for a device which will never answer."""
    with served() as (rig, layers, streams):
        streams.failing = torch.AcceleratorError("an illegal memory access was encountered")
        found = rig.outcomes_of([request(layers[n % 3], rows(1, layers[n % 3])) for n in range(30)])
        assert all(isinstance(outcome, DeviceLost) for outcome in found)
        assert "an illegal memory access" in str(found[0])
        assert "status 1" in str(found[0])


@pytest.mark.parametrize("stream", ["compute", "copy_out"])
def test_a_missing_event_is_seen(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    """Guards: streams of this file that run in order anyway, so that its tests pass whatever is missing."""
    real = ScriptedStreams.wait

    def wait(self: ScriptedStreams, waiting: int, event: int) -> None:
        if waiting != getattr(self, stream):
            real(self, waiting, event)

    monkeypatch.setattr(ScriptedStreams, "wait", wait)
    wrong = 0
    for seed in range(8):
        with served(seed) as (rig, layers, _):
            items = [request(layers[0], rows(8, layers[0], number)) for number in range(30)]
            for item, answer in zip(items, rig.answers(items), strict=True):
                x = torch.frombuffer(item.x.data, dtype=torch.bfloat16).view(8, -1)
                wrong += not torch.equal(tensor(answer, item), eager(layers[0], x, 8, CPU))
    assert wrong


def test_what_is_quick_is_known_before_it_is_sent() -> None:
    """Guards: an event loop that waits for a large forward, or for one whose kernels keep to their thread."""
    quick = served_layer("a", Emulation(), MxWeight.from_float(spread(34, 96)), CPU, LADDER)
    slow = served_layer("b", Emulation(), MxWeight.from_float(spread(34, 96)), CPU, LADDER)
    with running(CPU, LADDER, machine=lambda: machine(LADDER, took=20.0)) as rig:
        rig.capture(quick, slow)
        for program in slow.programs.values():
            program.microseconds = 500.0
        x = rows(3, quick)
        item = request(quick, x)
        assert rig.device.quick([item])
        assert rig.device.compute_now([item]) is None
        assert rig.device.start_now([item]) is None
        done = rig.device.receive_now(wait=True)
        assert done is not None
        assert isinstance(done.outcomes[0], Answer)
        same(tensor(done.outcomes[0], item), eager(quick, x, 4, CPU))
        assert rig.device.receive_now(wait=True) is None
        assert not rig.device.quick([request(slow, x)])
        assert not rig.device.quick([request(quick, rows(9, quick))])
        quick.programs[4].captured = False
        assert not rig.device.quick([request(quick, x)])


def test_a_device_that_is_lost_on_the_event_loop_is_lost() -> None:
    layer = served_layer("a", Emulation(), MxWeight.from_float(spread(34, 96)), CPU, LADDER)
    made = [machine(LADDER, took=20.0)]
    with running(CPU, LADDER, machine=made.pop) as rig:
        rig.capture(layer)
        layer.programs[1].run = broken
        done = rig.device.start_now([request(layer, rows(1, layer))])
        assert done is not None
        assert isinstance(done.outcomes[0], DeviceLost)
        assert done.lost is rig.device.lost
        assert not rig.device.quick([request(layer, rows(1, layer))])
        assert isinstance(rig.outcomes_of([request(layer, rows(1, layer))])[0], DeviceLost)


def broken() -> None:
    raise torch.AcceleratorError("an illegal memory access was encountered")
