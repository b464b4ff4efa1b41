"""What each backend answers on a GPU: exact data to the bit, other data row by row, in every plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gemmwire_service.backends.base import Backend, Plan
from gemmwire_service.backends.emulation import Emulation
from gemmwire_service.backends.emulation_e4m3 import EmulationE4m3
from gemmwire_service.buckets import Ladder
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import (
    NAN,
    Layer,
    check_exact,
    check_non_finite,
    check_spread,
    exact_layer,
    seeded,
    spread_layer,
    staged,
)
from on_gpu import available, sized
from oracle import assert_rows_close, assert_same_bits, rounded_once, sparse, spread

M = (1, 7, 8, 9, 128, 129, 300)
# N: one tile, padded to one, ragged in a group of 32, two widths of real models. K: ragged, blocks, tiles.
SHAPES = ((128, 256), (1, 33), (130, 384), (576, 341), (2112, 1536))


def named(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_exact_data_gives_the_exact_result(
    backend: Backend, device: torch.device, shape: tuple[int, int]
) -> None:
    """Guards: any scale, row or column in the wrong place, in either layout, with either quantizer."""
    layer = exact_layer(backend, *shape, bias=False, device=device)
    for m in M:
        check_exact(layer, m, layer.plans(m), device)


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_exact_data_with_a_bias(backend: Backend, device: torch.device, shape: tuple[int, int]) -> None:
    """Guards: a bias beside its column, and one that is rounded before it is added."""
    n, k = shape
    bias = torch.randint(-4096, 4097, (n,), generator=seeded(n)) / 16
    layer = Layer.of(backend, MxWeight.from_float(sparse(n, k, seeded(n, k)), bias), device)
    for m in (1, 9, 128):
        x = sparse(m, k, seeded(m, n, k)).to(torch.bfloat16)
        expected = with_bias(backend, layer.reference(x), bias)
        for plan in layer.plans(m):
            assert_same_bits(layer.forward(x.to(device), plan).cpu(), expected)


def with_bias(backend: Backend, exact: Tensor, bias: Tensor) -> Tensor:
    """Emulation rounds once; a kernel writes BF16, to which the bias is added in FP32 and rounded again."""
    if isinstance(backend, Emulation | EmulationE4m3):
        return rounded_once(exact + bias.double())
    return (rounded_once(exact).float() + bias).to(torch.bfloat16)


def test_exact_data_of_a_large_layer(backend: Backend, device: torch.device) -> None:
    """Guards: what only many tiles show: split K, clusters, persistent schedules."""
    size = sized(4096, 1024)
    layer = exact_layer(backend, size, size, bias=False, device=device)
    for m in (1, 16, 512):
        check_exact(layer, m, layer.plans(m), device)


@pytest.mark.parametrize("shape", SHAPES, ids=named)
def test_blocks_of_any_exponent(backend: Backend, device: torch.device, shape: tuple[int, int]) -> None:
    """Guards: a scale of a neighbour, which blocks of one magnitude would hide."""
    layer = spread_layer(backend, *shape, device=device)
    for m in M:
        check_spread(layer, m, layer.plans(m), device)


def test_emulation_on_the_gpu_is_that_of_the_cpu(backend: Backend, device: torch.device) -> None:
    """Guards: a reference that is itself another on the machine where it judges."""
    here, there = spread_layer(backend, 130, 384, device), spread_layer(Emulation(), 130, 384)
    x = spread(129, 384, seed=1).to(torch.bfloat16)
    y = there.forward(x, there.plans(129)[0]).double()
    assert_rows_close(here.forward(x.to(device), here.plans(129)[0]).cpu(), y, 2.0**-7)


@pytest.mark.parametrize("shape", [(1, 33), (130, 341), (128, 256)], ids=named)
def test_a_row_that_is_not_finite_is_a_row_of_nan(
    backend: Backend, device: torch.device, shape: tuple[int, int]
) -> None:
    """Guards: NaN and Inf that a quantizer turns into 448, and rows beside them that change."""
    layer = spread_layer(backend, *shape, device=device)
    for m in (1, 8, 129):
        for plan in layer.plans(m):
            check_non_finite(layer, m, plan, device)


def test_tiny_rows_stay_finite(backend: Backend, device: torch.device) -> None:
    """Guards: the reciprocal of a scale that is Inf, and NaN from it."""
    layer = Layer.of(backend, MxWeight.from_float(torch.ones(130, 384)), device)
    for value in (1e-36, 2.0**-126, 2.0**-133):
        x = torch.full((2, 384), value, dtype=torch.bfloat16, device=device)
        x[1, 192:] = 0.0
        for plan in layer.plans(2):
            assert layer.forward(x, plan).isfinite().all(), f"{value} with {plan}"


# What a row's bits depend on.


@pytest.mark.parametrize("poison", [NAN, 448.0, -448.0], ids=str)
def test_rows_below_m_change_nothing(backend: Backend, device: torch.device, poison: float) -> None:
    """Guards: scales of padding rows that are read for real ones, as the 8x4 layout invites."""
    layer = spread_layer(backend, 130, 384, device)
    for m, bucket in ((1, 8), (3, 8), (9, 16), (130, 256)):
        for plan in layer.backend.plans(bucket):
            clean = poisoned(layer, m, 0.0, plan, device)
            assert torch.equal(poisoned(layer, m, poison, plan, device), clean), f"m={m}, {plan}"


def poisoned(layer: Layer, m: int, below: float, plan: Plan, device: torch.device) -> Tensor:
    """BF16 [m, n]: m rows, and `below` in every element of the rows under them."""
    k = layer.weight.k
    x = staged(spread(m, k, seed=m).to(device), plan.bucket, layer.prepared.k_pad)
    x[m:, :k] = below
    out = torch.full((plan.bucket, layer.prepared.n_pad), NAN, dtype=torch.bfloat16, device=device)
    layer.backend.forward(x, layer.prepared, plan, out)
    return out[:m, : layer.weight.n]


@pytest.mark.parametrize("bucket", [8, 64, 256], ids="bucket{}".format)
def test_a_row_has_the_same_bits_wherever_it_stands_in_a_bucket(
    backend: Backend, device: torch.device, bucket: int
) -> None:
    """Guards: an answer that depends on what else was in the batch."""
    layer = spread_layer(backend, 130, 1536, device)
    row = spread(1, 1536, seed=5).to(torch.bfloat16).to(device)
    for plan in layer.backend.plans(bucket):
        alone = layer.forward(row, plan)
        for position in (0, bucket // 2, bucket - 1):
            x = spread(bucket, 1536, seed=position).to(torch.bfloat16).to(device)
            x[position] = row
            assert torch.equal(layer.forward(x, plan)[position], alone[0]), f"row {position}, {plan}"


def test_repetitions_have_the_same_bits(backend: Backend, device: torch.device) -> None:
    """Guards: sums in the order that blocks of threads happen to finish."""
    layer = spread_layer(backend, 576, 1536, device)
    x = spread(64, 1536, seed=2).to(torch.bfloat16).to(device)
    for plan in layer.backend.plans(64):
        first = layer.forward(x, plan)
        for number in range(sized(50, 2)):
            assert torch.equal(layer.forward(x, plan), first), f"repetition {number}, {plan}"


@pytest.mark.sm100
def test_batch_invariant_rows_have_the_same_bits_in_every_bucket(device: torch.device) -> None:
    """Guards: the one promise of the batch-invariant backend."""
    layer = spread_layer(available("flashinfer_batch_invariant", device), 130, 1536, device)
    row = spread(1, 1536, seed=5).to(torch.bfloat16).to(device)
    first: Tensor | None = None
    for bucket in Ladder().buckets:
        for plan in layer.backend.plans(bucket):
            y = layer.forward(row, plan)
            first = y if first is None else first
            assert torch.equal(y, first), f"{plan}"
