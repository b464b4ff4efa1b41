"""CUDA graphs of a forward: a replay is the forward, whatever is in the static tensors and around it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Backend, Plan, PreparedWeight
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import NAN, Layer, spread_layer, staged
from on_gpu import Graph, busy, capture, sized
from oracle import spread


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph over a static x and out."""

    layer: Layer
    plan: Plan
    x: Tensor
    out: Tensor
    graph: Graph

    @classmethod
    def of(cls, layer: Layer, plan: Plan, device: torch.device, stream: torch.cuda.Stream | None) -> Captured:
        x = torch.zeros(plan.bucket, layer.prepared.k_pad, dtype=torch.bfloat16, device=device)
        out = torch.empty(plan.bucket, layer.prepared.n_pad, dtype=torch.bfloat16, device=device)
        graph = capture(partial(layer.backend.forward, x, layer.prepared, plan, out), stream)
        return cls(layer, plan, x, out, graph)

    def replay(self, rows: Tensor) -> Tensor:
        """BF16 [m, k] -> BF16 [m, n], the rows below m zero."""
        m = rows.shape[0]
        self.x.copy_(staged(rows, *self.x.shape))
        self.out.fill_(NAN)
        self.graph.replay()
        return self.out[:m, : self.layer.weight.n].clone()


def rows(m: int, k: int, seed: int, device: torch.device) -> Tensor:
    return spread(m, k, seed=seed).to(torch.bfloat16).to(device)


@pytest.mark.parametrize("bucket", [1, 8, 16, 128, 512], ids="bucket{}".format)
def test_a_replay_is_the_forward_to_the_bit(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream | None, bucket: int
) -> None:
    """Guards: a graph that holds the x of its capture, or a buffer that was freed after it."""
    layer = spread_layer(backend, 130, 384, device)
    for plan in layer.backend.plans(bucket):
        captured = Captured.of(layer, plan, device, stream)
        for number in range(5):
            x = rows(bucket, 384, number, device)
            assert torch.equal(captured.replay(x), layer.forward(x, plan)), f"input {number}, {plan}"


def test_a_replay_of_fewer_rows(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream | None
) -> None:
    """Guards: rows of a larger request that a smaller one still sees."""
    layer = spread_layer(backend, 130, 384, device)
    for plan in layer.backend.plans(8):
        captured = Captured.of(layer, plan, device, stream)
        captured.replay(torch.full((8, 384), 448.0, dtype=torch.bfloat16, device=device))
        for m in (7, 1, 3):
            x = rows(m, 384, m, device)
            assert torch.equal(captured.replay(x), layer.forward(x, plan)), f"m={m}, {plan}"


def test_a_non_finite_row_in_a_replay(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Guards: a mask that was decided when the graph was captured."""
    layer = spread_layer(backend, 130, 384, device)
    captured = Captured.of(layer, layer.backend.plans(8)[0], device, stream)
    x = rows(8, 384, 1, device)
    clean = captured.replay(x)
    x[2, 77] = float("inf")
    y = captured.replay(x)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(y[others], clean[others])
    x[2, 77] = 1.0
    assert captured.replay(x).isfinite().all()


def test_replays_of_two_layers_do_not_disturb_each_other(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Guards: a workspace in one graph's memory that the other writes to."""
    layers = [spread_layer(backend, n, k, device) for n, k in ((130, 384), (576, 1536))]
    graphs = [Captured.of(layer, layer.backend.plans(16)[0], device, stream) for layer in layers]
    inputs = [rows(16, layer.weight.k, 3, device) for layer in layers]
    first = [graph.replay(x) for graph, x in zip(graphs, inputs, strict=True)]
    for number in range(sized(100, 2)):
        for graph, x, y in zip(graphs, inputs, first, strict=True):
            assert torch.equal(graph.replay(x), y), f"replay {number} of N={graph.layer.weight.n}"


def test_a_refit_in_place_is_seen_by_the_graph(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Guards: a graph that reads the addresses of weights that are gone."""
    bias = torch.linspace(-4, 4, 130)
    old, new = (
        Layer.of(backend, MxWeight.from_float(spread(130, 384, seed=seed), sign * bias), device)
        for seed, sign in ((1, 1), (2, -1))
    )
    graphs = [Captured.of(old, plan, device, stream) for plan in old.backend.plans(8)]
    addresses = [tensor.data_ptr() for tensor in tensors(old.prepared)]
    x = rows(8, 384, 3, device)
    before = [graph.replay(x) for graph in graphs]
    for target, source in zip(tensors(old.prepared), tensors(new.prepared), strict=True):
        target.copy_(source)
    assert [tensor.data_ptr() for tensor in tensors(old.prepared)] == addresses
    for graph, was in zip(graphs, before, strict=True):
        y = graph.replay(x)
        assert torch.equal(y, new.forward(x, graph.plan)), f"{graph.plan}"
        assert not torch.equal(y, was)


def tensors(prepared: PreparedWeight) -> list[Tensor]:
    values = (getattr(prepared, field.name) for field in fields(prepared))
    return [value for value in values if isinstance(value, Tensor)]


def test_another_thread_may_allocate_while_a_graph_is_captured(
    backend: Backend, device: torch.device, stream: torch.cuda.Stream
) -> None:
    """Guards: a capture that the loading of another layer invalidates."""
    layer = spread_layer(backend, 130, 384, device)
    with busy(partial(allocate, device)):
        graphs = [Captured.of(layer, layer.backend.plans(bucket)[0], device, stream) for bucket in (8, 16)]
    for graph in graphs:
        x = rows(graph.plan.bucket, 384, 3, device)
        assert torch.equal(graph.replay(x), layer.forward(x, graph.plan))


def allocate(device: torch.device) -> None:
    host = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.to(device, non_blocking=True)
