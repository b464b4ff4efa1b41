"""Emulation from E4M3 in memory: emulation's bits, half its memory, one scratch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from gemmwire import Client
from gemmwire_service.backends import BACKENDS, PRIORITY, select
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backends.emulation_e4m3 import E4m3Weight, EmulationE4m3
from gemmwire_service.backends.storage import nbytes
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import staged
from oracle import spread
from serving import serving, settings

CPU = torch.device("cpu")
# below and above what oneDNN packs from; K not of whole blocks; with a bias and without
SHAPES = [(1, 33, False), (130, 341, True), (64, 96, False), (300, 512, True), (512, 384, False)]


def run(backend: Emulation | EmulationE4m3, weight: PreparedWeight, x: Tensor) -> Tensor:
    m = len(x)
    out = torch.full((m, weight.n_pad), float("nan"), dtype=torch.bfloat16)
    backend.forward(staged(x, m, weight.k_pad), weight, Plan(m), out)
    return out.view(torch.int16)


def both(n: int, k: int, bias: bool, seed: int = 1) -> tuple[MxWeight, PreparedWeight, E4m3Weight]:
    b = torch.randn(n, generator=torch.Generator().manual_seed(seed)) if bias else None
    weight = MxWeight.from_float(spread(n, k, seed=seed), b)
    return weight, Emulation().prepare(weight, CPU), EmulationE4m3().prepare(weight, CPU)


@pytest.mark.parametrize("m", [1, 3, 16, 64, 300])
@pytest.mark.parametrize(("n", "k", "bias"), SHAPES, ids=str)
def test_the_bits_are_those_of_emulation(n: int, k: int, bias: bool, m: int) -> None:
    """Guards: a scale or a bias applied, or a sum rounded, another way."""
    _, theirs, ours = both(n, k, bias)
    x = spread(m, k, seed=m).to(torch.bfloat16)
    x[m // 2, k // 2] = float("inf") if m > 1 else 1.0
    assert torch.equal(run(EmulationE4m3(), ours, x), run(Emulation(), theirs, x))


def test_every_code_under_every_scale_is_what_emulation_holds() -> None:
    """Guards: a subnormal flushed to zero, or rounded twice, at either end of the range."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat_interleave(32)  # one code a block
    scales = torch.arange(248, dtype=torch.uint8)  # above 247 the largest code is beyond BF16
    rows = codes.expand(len(scales), -1).clone()
    weight = MxWeight.from_mxfp8(
        rows.view(torch.float8_e4m3fn), scales[:, None].expand(-1, rows.shape[1] // 32).contiguous()
    )
    too_large = (rows.view(torch.float8_e4m3fn).float().abs() > 255) & (scales[:, None] == 247)
    weight.codes.view(torch.uint8)[too_large] = 0
    x = torch.eye(rows.shape[1])[::32].to(torch.bfloat16)
    theirs, ours = Emulation().prepare(weight, CPU), EmulationE4m3().prepare(weight, CPU)
    assert torch.equal(run(EmulationE4m3(), ours, x), run(Emulation(), theirs, x))


def test_it_takes_half_the_memory() -> None:
    """Guards: the point of it."""
    size = 2048 * 1056  # above what emulation keeps twice
    weight, theirs, ours = both(2048, 1056, bias=False)
    assert nbytes(ours) == size + 2 * size // 32
    assert nbytes(theirs) == 2 * size
    assert ours.codes.data_ptr() != weight.codes.data_ptr(), "a weight that its owner cannot free"


def test_layers_share_one_scratch() -> None:
    """Guards: a scratch for each layer, which is all that was saved; one that keeps another's columns."""
    backend = EmulationE4m3()
    layers = [both(n, k, bias)[2] for n, k, bias in SHAPES]
    xs = [spread(5, layer.k, seed=3).to(torch.bfloat16) for layer in layers]
    fresh = [run(EmulationE4m3(), layer, x) for layer, x in zip(layers, xs, strict=True)]
    for _ in range(2):
        for layer, x, expected in zip(layers, xs, fresh, strict=True):
            assert torch.equal(run(backend, layer, x), expected)
    kept: Tensor = backend._matrices._threads.kept
    assert len(kept) == max(layer.n * layer.columns for layer in layers)


def test_threads_do_not_share_it() -> None:
    """Guards: two servers in one process that overwrite each other's weight."""
    backend = EmulationE4m3()
    layers = [both(256, 256, bias=True, seed=seed)[2] for seed in range(4)]
    x = spread(3, 256).to(torch.bfloat16)
    expected = [run(backend, layer, x) for layer in layers]

    def repeat(number: int) -> bool:
        return all(torch.equal(run(backend, layers[number], x), expected[number]) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, range(4)))


def test_inference_mode_and_none_may_alternate() -> None:
    """Guards: scratch made in inference mode, which cannot be written outside it."""
    _, _, layer = both(64, 96, bias=True)
    backend, x = EmulationE4m3(), spread(3, 96).to(torch.bfloat16)
    with torch.inference_mode():
        inside = run(backend, layer, x)
    assert torch.equal(run(backend, layer, x), inside)


def test_a_weight_beyond_bf16_is_refused_with_its_place() -> None:
    """Guards: an Inf that emulation refuses, made anew in each forward."""
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[1, 40] = 0x78
    scales = torch.full((2, 2), 247, dtype=torch.uint8)
    weight = MxWeight.from_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    with pytest.raises(BackendError, match=r"weight\[1, 40\] is too large for emulation"):
        EmulationE4m3().prepare(weight, CPU)


def test_it_is_chosen_by_its_name_alone() -> None:
    assert "emulation_e4m3" in BACKENDS
    assert "emulation_e4m3" not in PRIORITY
    spec = LayerSpec("l", 64, 96, bias=False)
    assert select(spec, CPU, "emulation_e4m3").backend.name == "emulation_e4m3"
    assert select(spec, CPU, "flashinfer_trtllm,emulation_e4m3").backend.name == "emulation_e4m3"


def test_a_weight_of_emulation_is_foreign_to_it() -> None:
    _, theirs, ours = both(64, 96, bias=False)
    x = torch.zeros(1, 96)
    with pytest.raises(TypeError, match="emulation_e4m3 did not prepare this weight"):
        run(EmulationE4m3(), theirs, x)
    with pytest.raises(TypeError, match="emulation did not prepare this weight"):
        run(Emulation(), ours, x)


def test_it_serves_and_is_refitted() -> None:
    """Guards: a form that no refit can exchange."""
    x, w = spread(3, 384).to(torch.bfloat16), spread(200, 384) / 2**14
    answers = []
    for backend in ("emulation", "emulation_e4m3"):
        options = settings(random_layer=("r=200x384",), backend=backend, max_bucket=16)
        with serving(options) as served, Client(served.url) as client:
            before = client.infer("r", x)
            client.refit("r", w)
            after = client.call("r", x)
            assert (after.backend, after.version) == (backend, "2")
            answers.append((before, after.y))
    (one, two), (three, four) = answers
    assert torch.equal(one, three)
    assert torch.equal(two, four)
    assert not torch.equal(one, two)
