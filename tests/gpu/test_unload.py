"""Layers that leave a GPU and others that come: their graphs, and the memory of both."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Backend
from gemmwire_service.buckets import Ladder
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.weight import MxWeight
from on_device import Rig, eager, running, served_layer
from on_gpu import REHEARSAL, sized
from oracle import spread

pytestmark = pytest.mark.gpu
LADDER = Ladder.up_to(sized(256, 16))
N, K = sized(1024, 130), sized(1536, 384)


def layer(name: str, backend: Backend, device: torch.device) -> Layer:
    return served_layer(name, backend, MxWeight.from_float(spread(N, K, seed=len(name))), device, LADDER)


def release(rig: Rig, served: Layer) -> None:
    rig.job(lambda: rig.device.release(served))


def check(rig: Rig, served: Layer, device: torch.device) -> None:
    for m in (1, 7, 16):
        x: Tensor = spread(m, K, seed=m).to(torch.bfloat16)
        y, expected = rig.infer(served, x), eager(served, x, LADDER.bucket_for(m), device)
        assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), f"{served.name}, m={m}"


def assert_graphs(served: Layer) -> None:
    assert REHEARSAL or all(served.has_graph(bucket) for bucket in LADDER.buckets), served.graphs


def test_graphs_of_others_outlive_those_of_a_layer_that_leaves(
    backend: Backend, device: torch.device
) -> None:
    """Guards: a pool that goes with one of the layers whose graphs use it, to be written to by others."""
    first, second, third = (layer(name, backend, device) for name in ("a", "bb", "ccc"))
    with running(device, LADDER) as rig:
        rig.capture(first, second)
        release(rig, first)
        del first
        gc.collect()
        torch.cuda.empty_cache()
        check(rig, second, device)
        rig.capture(third)
        for served in (third, second, third):
            check(rig, served, device)
            assert_graphs(served)


def test_a_layer_that_comes_after_all_have_left_has_its_graphs(
    backend: Backend, device: torch.device
) -> None:
    """Guards: a capture into the pool that went with the last graph."""
    with running(device, LADDER) as rig:
        for name in ("a", "bb", "ccc"):
            served = layer(name, backend, device)
            rig.capture(served)
            check(rig, served, device)
            assert_graphs(served)
            release(rig, served)
            del served
            gc.collect()


def test_a_request_that_comes_after_its_layer_has_left_is_answered(
    backend: Backend, device: torch.device
) -> None:
    served = layer("a", backend, device)
    with running(device, LADDER) as rig:
        rig.capture(served)
        release(rig, served)
        check(rig, served, device)


def test_memory_is_as_it_was_once_a_layer_has_left(backend: Backend, device: torch.device) -> None:
    """Guards: a weight or a graph that somebody holds; loading again and again would end without memory."""
    with running(device, LADDER, graph_budget=1 << 30) as rig:
        allocated: list[int] = []
        gone: list[weakref.ref[Any]] = []
        for number in range(4):
            served = layer("x" * (number + 1), backend, device)
            rig.capture(served)
            check(rig, served, device)
            gone += [weakref.ref(served), weakref.ref(served.routes.by_bucket[LADDER.largest].weight)]
            release(rig, served)
            del served
            rig.job(lambda: None)  # the device keeps its last job until the next
            gc.collect()
            assert not any(each() for each in gone), f"round {number}"
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                allocated.append(torch.cuda.memory_allocated(device))
        assert len(set(allocated[1:])) <= 1, allocated  # x, y and staging of a shape stay
