"""Emulation from E4M3 in memory on a GPU: emulation's bits, in a graph too, and half its memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Plan
from gemmwire_service.backends.emulation import BIAS_COLUMNS, Emulation
from gemmwire_service.backends.emulation_e4m3 import EmulationE4m3
from gemmwire_service.backends.storage import nbytes
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import staged
from on_gpu import capture
from oracle import spread

pytestmark = pytest.mark.gpu
SHAPES = [(130, 341, True), (64, 96, False), (4096, 4096, False), (1000, 1536, True)]


@pytest.mark.parametrize(("n", "k", "bias"), SHAPES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 128, 512])
def test_the_bits_are_those_of_emulation_in_a_graph_too(
    device: torch.device, stream: torch.cuda.Stream, n: int, k: int, bias: bool, m: int
) -> None:
    """Guards: another matmul for another address, a subnormal flushed to zero, a scratch that moved."""
    weight = MxWeight.from_float(spread(n, k, seed=n), torch.linspace(-4, 4, n) if bias else None)
    x = staged(spread(m, k, seed=m).to(torch.bfloat16), m, weight.k_pad).to(device)
    ours, theirs = EmulationE4m3().prepare(weight, device), Emulation().prepare(weight, device)
    backend, expected = EmulationE4m3(), torch.empty(m, n, dtype=torch.bfloat16, device=device)
    Emulation().forward(x, theirs, Plan(m), expected)
    y = torch.empty_like(expected)
    backend.forward(x, ours, Plan(m), y)
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), "eager"
    graph = capture(partial(backend.forward, x, ours, Plan(m), y), stream)
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(y.view(torch.int16), expected.view(torch.int16)), "graph"
    beside = 2 * n * BIAS_COLUMNS if bias else 0  # bytes of the bias, which is BF16 in both
    assert nbytes(ours) - beside <= 0.55 * (nbytes(theirs) - beside)


def test_every_code_under_every_scale_is_what_emulation_holds(device: torch.device) -> None:
    """Guards: subnormals of BF16 flushed to zero by a kernel that FP32 is not."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat_interleave(32)
    scales = torch.arange(247, dtype=torch.uint8)
    rows = codes.expand(len(scales), -1).contiguous().view(torch.float8_e4m3fn)
    weight = MxWeight.from_mxfp8(rows, scales[:, None].expand(-1, rows.shape[1] // 32).contiguous())
    x = torch.eye(rows.shape[1])[::32].to(torch.bfloat16).to(device)

    def run(backend: Emulation | EmulationE4m3) -> Tensor:
        out = torch.empty(len(x), weight.n, dtype=torch.bfloat16, device=device)
        backend.forward(x, backend.prepare(weight, device), Plan(len(x)), out)
        return out.view(torch.int16)

    assert torch.equal(run(EmulationE4m3()), run(Emulation()))


def test_many_graphs_share_one_scratch(device: torch.device, stream: torch.cuda.Stream) -> None:
    """Guards: a scratch for each layer and bucket, which is all that was saved."""
    backend, pool = EmulationE4m3(), torch.cuda.graph_pool_handle()
    x = torch.ones(16, 4096, dtype=torch.bfloat16, device=device)
    layers = [backend.prepare(MxWeight.from_float(spread(4096, 4096, seed=i)), device) for i in range(4)]
    outs = [torch.empty(16, 4096, dtype=torch.bfloat16, device=device) for _ in layers]
    graphs, reserved = [], []
    for layer, out in zip(layers, outs, strict=True):
        run = partial(backend.forward, x, layer, Plan(16), out)
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            run()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                run()
        graphs.append(graph)
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[-1] - reserved[0] <= 2 << 20, f"reserved after each graph: {reserved}"
    expected = [out.clone() for out in outs]
    for out, graph in zip(outs, graphs, strict=True):
        out.zero_()
        graph.replay()
    torch.cuda.synchronize(device)
    assert all(torch.equal(out, y) for out, y in zip(outs, expected, strict=True))
