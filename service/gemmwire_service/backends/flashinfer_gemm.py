"""One call of FlashInfer's `mm_mxfp8` and what surrounds it, the same for each of the backends behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from gemmwire_service.backends import flashinfer_quantizer
from gemmwire_service.backends.base import Plan, check_shapes
from gemmwire_service.backends.block_scaled import BlockScaledWeight, check_layout, finish, non_finite_rows
from gemmwire_service.mxfp8.layout import ScaleLayout

Layouts = tuple[ScaleLayout, ...]


def plans(bucket: int, layouts: Layouts) -> tuple[Plan, ...]:
    """Each layout with each quantizer, the layouts in the order given."""
    quantizers = flashinfer_quantizer.QUANTIZER.names()
    return tuple(Plan(bucket, layout.value, name) for layout in layouts for name in quantizers)


def forward(
    x: Tensor,
    weight: BlockScaledWeight,
    plan: Plan,
    out: Tensor,
    *,
    backend: str,
    layouts: Layouts,
    batch_invariant: bool = False,
) -> None:
    """Backend.forward by FlashInfer's `backend`, which reads scales of x in one of `layouts`."""
    check_layout(backend, plan, layouts)
    plan = plan if plan.layout else plans(plan.bucket, layouts)[0]
    check_shapes(x, weight, plan, out)
    non_finite = non_finite_rows(x)
    codes, scales = flashinfer_quantizer.QUANTIZER.quantize(x, ScaleLayout(plan.layout), plan.quantizer)
    _multiply(codes, scales, weight, out, plan, backend, batch_invariant)
    finish(out, weight.bias, non_finite)


def _multiply(
    codes: Tensor,
    scales: Tensor,
    weight: BlockScaledWeight,
    out: Tensor,
    plan: Plan,
    backend: str,
    batch_invariant: bool,
) -> None:
    """Raises RuntimeError where FlashInfer answers in another tensor: writing to out is not documented for
    every backend."""
    import flashinfer

    answer = flashinfer.mm_mxfp8(
        a=codes,
        b=weight.codes.t(),
        a_descale=scales,
        b_descale=weight.scales,
        out=out,
        out_dtype=torch.bfloat16,
        use_8x4_sf_layout=plan.layout == ScaleLayout.R8C4,
        backend=backend,
        batch_invariant=batch_invariant,
    )
    if answer.data_ptr() != out.data_ptr():
        raise RuntimeError(f"mm_mxfp8 with backend {backend} did not write to `out`")
