"""Forwards of the kernel backends as the device runs them, and what they have to answer.

The same checks serve the simulators, the mutations of the backends and a GPU; `device` says where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gemmwire_service.backends.base import Backend, Plan, PreparedWeight
from gemmwire_service.buckets import Ladder
from gemmwire_service.mxfp8.format import dequantize, quantize
from gemmwire_service.mxfp8.weight import MxWeight
from oracle import TOLERANCE, assert_rows_close, assert_same_bits, rounded_once, sparse, spread

KERNELS = (
    "flashinfer_trtllm",
    "flashinfer_cutedsl",
    "flashinfer_cutlass",
    "flashinfer_batch_invariant",
    "cublas",
)
M = (1, 7, 8, 9, 128, 129, 300)
SHAPES = tuple((n, k) for n in (1, 64, 130, 576, 2112) for k in (33, 128, 341, 384, 1536))
FEW_SHAPES = ((1, 33), (64, 128), (130, 341), (576, 384), (130, 1536))
CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight and what one backend made of it."""

    backend: Backend
    weight: MxWeight
    prepared: PreparedWeight

    @classmethod
    def of(cls, backend: Backend, weight: MxWeight, device: torch.device = CPU) -> Layer:
        return cls(backend, weight, backend.prepare(weight, device))

    def plans(self, m: int) -> tuple[Plan, ...]:
        return self.backend.plans(Ladder().bucket_for(m))

    def layouts(self, m: int) -> tuple[Plan, ...]:
        """One plan for each layout of the scales of x; quantizers give the same bytes."""
        firsts: dict[str, Plan] = {}
        for plan in self.plans(m):
            firsts.setdefault(plan.layout, plan)
        return tuple(firsts.values())

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        """BF16 [m, k] -> BF16 [m, n], staged as the device does it, into an output that holds NaN."""
        m = x.shape[0]
        staging = staged(x, plan.bucket, self.prepared.k_pad)
        before = staging.clone()
        out = torch.full((plan.bucket, self.prepared.n_pad), NAN, dtype=torch.bfloat16, device=x.device)
        self.backend.forward(staging, self.prepared, plan, out)
        assert torch.equal(staging.view(torch.int16), before.view(torch.int16)), "the forward changed x"
        self._check_padding(out[m:], out[:m, self.weight.n :], x)
        return out[:m, : self.weight.n]

    def _check_padding(self, below: Tensor, beside: Tensor, x: Tensor) -> None:
        """What pads the output, which nobody reads, tells of what pads the operands: both are zero."""
        finite = x.isfinite().all(-1)
        assert not beside[finite].any(), "columns beyond N are not zero: a weight's padding is not"
        bias = self.weight.bias
        alone = torch.zeros(self.weight.n) if bias is None else bias.to(torch.bfloat16)
        expected = alone.to(below.device, torch.bfloat16).expand(len(below), -1)
        assert torch.equal(below[:, : self.weight.n], expected), "rows beyond m are not those of zeros"

    def reference(self, x: Tensor) -> Tensor:
        """float64 [m, n] without the bias, of the dequantized operands."""
        padded = torch.nn.functional.pad(x.cpu(), (0, self.weight.k_pad - x.shape[1]))
        return dequantize(*quantize(padded), torch.float64) @ self._dequantized.T

    @cached_property
    def _dequantized(self) -> Tensor:
        return dequantize(self.weight.codes, self.weight.scales, torch.float64)


def staged(x: Tensor, rows: int, columns: int) -> Tensor:
    """x among zeros, as a forward takes it."""
    staging = torch.zeros(rows, columns, dtype=torch.bfloat16, device=x.device)
    staging[: x.shape[0], : x.shape[1]] = x
    return staging


def seeded(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(numbers) % 2**32)


def exact_layer(backend: Backend, n: int, k: int, bias: bool, device: torch.device = CPU) -> Layer:
    """Sparse numbers that E4M3 holds; a bias of more bits than BF16 has."""
    generator = seeded(n, k)
    b = torch.randint(-(2**20), 2**20, (n,), generator=generator) / 2**12 if bias else None
    return Layer.of(backend, MxWeight.from_float(sparse(n, k, generator), b), device)


def check_exact(layer: Layer, m: int, plans: Iterable[Plan], device: torch.device = CPU) -> None:
    """The kernel rounds the exact sum to BF16; the bias is added in FP32 and rounded once more."""
    x = sparse(m, layer.weight.k, seeded(m, layer.weight.n, layer.weight.k)).to(torch.bfloat16)
    expected = rounded_once(layer.reference(x))
    if layer.weight.bias is not None:
        expected = (expected.float() + layer.weight.bias).to(torch.bfloat16)
    for plan in plans:
        assert_same_bits(layer.forward(x.to(device), plan).cpu(), expected)


def spread_layer(backend: Backend, n: int, k: int, device: torch.device = CPU) -> Layer:
    """Blocks that differ in exponent."""
    return Layer.of(backend, MxWeight.from_float(spread(n, k, seed=n + k)), device)


def check_spread(layer: Layer, m: int, plans: Iterable[Plan], device: torch.device = CPU) -> None:
    x = spread(m, layer.weight.k, seed=m).to(torch.bfloat16)
    expected = layer.reference(x)
    for plan in plans:
        assert_rows_close(layer.forward(x.to(device), plan).cpu(), expected, TOLERANCE)


def check_non_finite(layer: Layer, m: int, plan: Plan, device: torch.device = CPU) -> None:
    """Each third row has a NaN or an Inf: it is NaN throughout, and the others keep their bits."""
    x = spread(m, layer.weight.k, seed=m).to(torch.bfloat16).to(device)
    clean = layer.forward(x, plan)
    bad = torch.arange(0, m, 3)
    for row, value in zip(bad.tolist(), (NAN, float("inf"), -float("inf")) * m, strict=False):
        x[row, (7 * row) % x.shape[1]] = value
    y = layer.forward(x, plan)
    assert y[bad].isnan().all(), "a row with a NaN or Inf is not NaN throughout"
    good = torch.ones(m, dtype=torch.bool)
    good[bad] = False
    assert torch.equal(y[good], clean[good]), "a row beside one with a NaN or Inf changed"


def battery(backend: Backend) -> None:
    """Every check, over few shapes that each carry a meaning."""
    # N: half a tile, ragged within a group of 32 rows, ragged between groups, tiles. K: whole blocks or not.
    for n, k in ((64, 128), (130, 341), (576, 384), (256, 512)):
        layer = exact_layer(backend, n, k, bias=True)
        for m in (1, 8, 9, 128, 300):
            check_exact(layer, m, layer.layouts(m))
        layer = spread_layer(backend, n, k)
        for m in (1, 7, 128):
            check_spread(layer, m, layer.layouts(m))
            check_non_finite(layer, m, layer.plans(m)[0])
