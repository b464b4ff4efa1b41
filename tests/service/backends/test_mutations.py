"""Each way to get a layout, a padding, a bias or a mask wrong, made on purpose: the checks must see it.

A mutation changes one thing in the backend's own code, or in what it passes to the kernel. `caught` is how:
by the numbers (AssertionError), or because the kernel refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashinfer_sim
import kernels
from gemmwire_service.backends import (
    BACKENDS,
    block_scaled,
    cublas,
    flashinfer_gemm,
    flashinfer_quantizer,
    flashinfer_trtllm,
)
from gemmwire_service.backends.block_scaled import Padded, pad
from gemmwire_service.mxfp8.layout import (
    ScaleLayout,
    round_up,
    shuffle_rows,
    shuffle_scales,
    swizzle,
    unshuffle_rows,
)
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import battery, check_exact, exact_layer
from sm100 import simulate

Patch = pytest.MonkeyPatch
TRTLLM, CUTEDSL, CUTLASS = "flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass"
BATCH_INVARIANT, CUBLAS = "flashinfer_batch_invariant", "cublas"
NUMBERS = AssertionError


@dataclass(frozen=True)
class Mutation:
    name: str
    backend: str
    mutate: Callable[[Patch], None]
    caught: type[Exception] = NUMBERS


def passing(patch: Patch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The backend calls mm_mxfp8 with other arguments."""
    real = flashinfer_sim.mm_mxfp8

    def mm_mxfp8(**call: Any) -> Tensor:
        answer: Tensor = real(**{**call, **change(call)})
        return answer

    mm_mxfp8.is_backend_supported = real.is_backend_supported  # type: ignore[attr-defined]
    patch.setattr(flashinfer_sim, "mm_mxfp8", mm_mxfp8)


def padding(patch: Patch, change: Callable[[Padded, MxWeight], Padded]) -> None:
    """The weight is padded, and then something happens to it."""

    def changed(weight: MxWeight, *args: Any) -> Padded:
        return change(pad(weight, *args), weight)

    patch.setattr(block_scaled, "pad", changed)
    patch.setattr(flashinfer_trtllm, "pad", changed)


def quantizing(patch: Patch, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """What the quantizer gave is not what is multiplied."""
    real = flashinfer_quantizer.QUANTIZER.quantize
    patch.setattr(flashinfer_quantizer.QUANTIZER, "quantize", lambda *args: change(*real(*args)))


def staging(patch: Patch, change: Callable[[Tensor, int, int], None]) -> None:
    """x arrives with something between its zeros; change(staged x, m, k)."""
    real = kernels.staged

    def staged(x: Tensor, rows: int, columns: int) -> Tensor:
        among = real(x, rows, columns)
        change(among, *x.shape)
        return among

    patch.setattr(kernels, "staged", staged)


# What x's scales are, and what the kernel is told.


def told(use_8x4: bool) -> Callable[[Patch], None]:
    return lambda patch: passing(patch, lambda _: {"use_8x4_sf_layout": use_8x4})


def told_backend(name: str) -> Callable[[Patch], None]:
    return lambda patch: passing(patch, lambda _: {"backend": name})


def cutlass_for_trtllm(patch: Patch) -> None:
    """As "auto" would do it, which knows nothing of the shuffle."""
    patch.setattr(flashinfer_trtllm, "_layouts", lambda bucket: (ScaleLayout.R128C4,))
    told_backend("auto")(patch)


def enums_swapped(patch: Patch) -> None:
    patch.setitem(flashinfer_quantizer._SF_LAYOUTS, ScaleLayout.R8C4, "layout_128x4")
    patch.setitem(flashinfer_quantizer._SF_LAYOUTS, ScaleLayout.R128C4, "layout_8x4")


def linear_for(layout: ScaleLayout) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(flashinfer_quantizer._SF_LAYOUTS, layout, "layout_linear")


def eight_by_four_unannounced(patch: Patch) -> None:
    """8x4 where 128x4 is read, with lengths that pass: cute-dsl takes the flag and ignores it."""
    patch.setitem(flashinfer_quantizer._SF_LAYOUTS, ScaleLayout.R128C4, "layout_8x4")
    told(True)(patch)


def x_scale_rows_rolled(patch: Patch) -> None:
    quantizing(patch, lambda codes, scales: (codes, scales.view(-1, 4).roll(1, 0).reshape(-1)))


# The weight.


def replacing(name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(flashinfer_trtllm, name, value)


def unshuffled_scales(scales: Tensor) -> Tensor:
    return swizzle(scales, ScaleLayout.R128C4)


def neither_shuffled(patch: Patch) -> None:
    patch.setattr(flashinfer_trtllm, "shuffle_rows", torch.clone)
    patch.setattr(flashinfer_trtllm, "shuffle_scales", unshuffled_scales)


def shuffled_before_padding(patch: Patch) -> None:
    """The last rows go to places within themselves, not among the padding."""

    def early(matrix: Tensor, n: int) -> Tensor:
        groups, rest = divmod(n, 32)
        inner = [8 * (row % 4) + row // 4 for row in range(32)]
        order = sorted(range(rest), key=inner.__getitem__)
        return torch.cat(
            [shuffle_rows(matrix[: 32 * groups]), matrix[32 * groups : n][order], matrix[n:]]
        ).contiguous()

    def change(padded: Padded, weight: MxWeight) -> Padded:
        return replace(padded, codes=early(padded.codes, weight.n), scales=early(padded.scales, weight.n))

    padding(patch, change)
    neither_shuffled(patch)


def weight_scales(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    return lambda patch: padding(patch, lambda padded, _: replace(padded, scales=change(padded.scales)))


def scales_not_sliced(patch: Patch) -> None:
    """A checkpoint's scales in whole tiles, one tile more than K needs."""
    weight_scales(lambda scales: torch.nn.functional.pad(scales, (0, 4), value=130))(patch)


def stale_weight_rows(patch: Patch) -> None:
    def change(padded: Padded, weight: MxWeight) -> Padded:
        padded.codes[weight.n :] = 0x38  # 1.0
        return padded

    padding(patch, change)


def stale_weight_columns(patch: Patch) -> None:
    """What memory can hold: NaN, which zeros in x do not silence."""

    def change(padded: Padded, weight: MxWeight) -> Padded:
        padded.codes[:, weight.k_pad :] = 0x7F
        return padded

    padding(patch, change)


def transposed_copy(patch: Patch) -> None:
    passing(patch, lambda call: {"b": call["b"].view(torch.uint8).contiguous().view(call["b"].dtype)})


# The bias, the mask and x.


def bias(change: Callable[[Tensor, int], Tensor]) -> Callable[[Patch], None]:
    """change(bias [n_pad], n)."""

    def mutate(patch: Patch) -> None:
        padding(
            patch,
            lambda padded, weight: (
                padded if padded.bias is None else replace(padded, bias=change(padded.bias, weight.n))
            ),
        )

    return mutate


def without_bias(patch: Patch) -> None:
    padding(patch, lambda padded, _: replace(padded, bias=None))


def masking(function: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        patch.setattr(flashinfer_gemm, "non_finite_rows", function)
        patch.setattr(cublas, "non_finite_rows", function)

    return mutate


def stale_x_columns(x: Tensor, m: int, k: int) -> None:
    x[:, k:] = 3.0e4


def stale_x_row(x: Tensor, m: int, k: int) -> None:
    x[m:, :k] = 1.0


def cublas_scales_in(layout: ScaleLayout) -> Callable[[Patch], None]:
    """Of x: flat, and as long as 128x4 needs them."""

    def flat(scales: Tensor, _: ScaleLayout) -> Tensor:
        size = round_up(scales.shape[0], 128) * round_up(scales.shape[1], 4)
        tiled = swizzle(scales, layout)
        return torch.nn.functional.pad(tiled, (0, size - len(tiled)))

    return lambda patch: patch.setattr(cublas, "swizzle", flat)


MUTATIONS = [
    Mutation("x-scales-told-to-be-128x4", TRTLLM, told(False), ValueError),
    Mutation("x-scales-told-to-be-8x4", TRTLLM, told(True), ValueError),
    Mutation("sf-layout-enum-swapped", TRTLLM, enums_swapped, ValueError),
    Mutation("sf-layout-linear-for-8x4", TRTLLM, linear_for(ScaleLayout.R8C4), ValueError),
    Mutation("sf-layout-linear-for-128x4", CUTLASS, linear_for(ScaleLayout.R128C4), ValueError),
    Mutation("x-scale-rows-permuted", TRTLLM, x_scale_rows_rolled),
    Mutation("x-scale-rows-permuted-cutlass", CUTLASS, x_scale_rows_rolled),
    Mutation("x-scales-8x4-for-cute-dsl", CUTEDSL, eight_by_four_unannounced),
    Mutation("x-scales-8x4-for-cutlass", CUTLASS, eight_by_four_unannounced, ValueError),
    Mutation("x-scales-8x4-for-batch-invariant", BATCH_INVARIANT, eight_by_four_unannounced, ValueError),
    Mutation("x-scales-linear-for-cublas", CUBLAS, cublas_scales_in(ScaleLayout.LINEAR)),
    Mutation("x-scales-8x4-for-cublas", CUBLAS, cublas_scales_in(ScaleLayout.R8C4)),
    Mutation("weight-rows-not-shuffled", TRTLLM, replacing("shuffle_rows", torch.clone)),
    Mutation("weight-scales-not-shuffled", TRTLLM, replacing("shuffle_scales", unshuffled_scales)),
    Mutation("neither-shuffled", TRTLLM, neither_shuffled),
    Mutation("shuffled-the-other-way", TRTLLM, replacing("shuffle_rows", unshuffle_rows)),
    Mutation("shuffled-before-padding", TRTLLM, shuffled_before_padding),
    Mutation("n-padded-to-32-only", TRTLLM, replacing("TILE", 32), ValueError),
    Mutation("k-padded-to-128-only", TRTLLM, replacing("K_MULTIPLE", 128), ValueError),
    Mutation("weight-rows-beyond-n-stale", TRTLLM, stale_weight_rows),
    Mutation("weight-columns-beyond-k-stale", TRTLLM, stale_weight_columns),
    Mutation("weight-columns-beyond-k-stale-cublas", CUBLAS, stale_weight_columns),
    Mutation("weight-scale-rows-permuted", TRTLLM, weight_scales(lambda s: s.roll(1, 0))),
    Mutation("weight-scale-rows-permuted-cutlass", CUTLASS, weight_scales(lambda s: s.roll(1, 0))),
    Mutation("weight-scale-rows-permuted-cublas", CUBLAS, weight_scales(lambda s: s.flip(0))),
    Mutation("weight-scale-columns-permuted", TRTLLM, weight_scales(lambda s: s.flip(1))),
    Mutation(
        "weight-scales-in-8x4",
        TRTLLM,
        replacing("shuffle_scales", lambda s: swizzle(shuffle_rows(s), ScaleLayout.R8C4)),
    ),
    Mutation(
        "weight-scales-linear", TRTLLM, replacing("shuffle_scales", lambda s: shuffle_rows(s).reshape(-1))
    ),
    Mutation("weight-scales-twice", TRTLLM, weight_scales(lambda s: shuffle_scales(s).view(s.shape))),
    Mutation("weight-scales-not-sliced", TRTLLM, scales_not_sliced, ValueError),
    Mutation("weight-scales-not-sliced-cutlass", CUTLASS, scales_not_sliced, ValueError),
    Mutation("weight-copied-into-the-other-order", TRTLLM, transposed_copy, RuntimeError),
    Mutation("8x4-through-auto", TRTLLM, told_backend("auto"), flashinfer_sim.BackendSupportedError),
    Mutation("shuffled-weight-through-cutlass", TRTLLM, cutlass_for_trtllm),
    Mutation("out-not-passed", TRTLLM, lambda p: passing(p, lambda _: {"out": None}), RuntimeError),
    Mutation("bias-shuffled-as-the-rows", TRTLLM, bias(lambda b, _: shuffle_rows(b))),
    Mutation("bias-a-row-off", TRTLLM, bias(lambda b, _: b.roll(1))),
    Mutation("bias-before-the-slice", TRTLLM, bias(lambda b, n: b[:n]), RuntimeError),
    Mutation("bias-behind-the-padding", TRTLLM, bias(lambda b, n: b.roll(len(b) - n))),
    Mutation("bias-in-bf16", TRTLLM, bias(lambda b, _: b.bfloat16())),
    Mutation("bias-in-bf16-cublas", CUBLAS, bias(lambda b, _: b.bfloat16())),
    Mutation("bias-forgotten", CUTEDSL, without_bias),
    Mutation("mask-forgotten", TRTLLM, masking(lambda x: torch.zeros(len(x), 1, dtype=torch.bool))),
    Mutation("mask-forgotten-cublas", CUBLAS, masking(lambda x: torch.zeros(len(x), 1, dtype=torch.bool))),
    Mutation("mask-of-nan-alone", TRTLLM, masking(lambda x: x.isnan().any(-1, keepdim=True))),
    Mutation("mask-of-the-row-above", TRTLLM, masking(lambda x: ~x.isfinite().all(-1, True).roll(1))),
    Mutation("x-columns-beyond-k-stale", TRTLLM, lambda p: staging(p, stale_x_columns)),
    Mutation("x-columns-beyond-k-stale-cublas", CUBLAS, lambda p: staging(p, stale_x_columns)),
    Mutation("x-rows-beyond-m-stale", TRTLLM, lambda p: staging(p, stale_x_row)),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_is_caught(monkeypatch: Patch, mutation: Mutation) -> None:
    """Guards: tests that pass whatever the layout is."""
    simulate(monkeypatch)
    backend = BACKENDS[mutation.backend]()
    with monkeypatch.context() as patch:
        mutation.mutate(patch)
        with pytest.raises(mutation.caught):
            battery(backend)


@pytest.mark.parametrize("name", sorted({mutation.backend for mutation in MUTATIONS}))
def test_nothing_is_caught_without_a_mutation(monkeypatch: Patch, name: str) -> None:
    """Guards: a battery that fails by itself, and catches every mutation therefore."""
    simulate(monkeypatch)
    battery(BACKENDS[name]())


@pytest.mark.parametrize("layout", [ScaleLayout.R8C4, ScaleLayout.R128C4], ids=lambda layout: layout.value)
def test_swapped_layouts_of_one_length_give_other_numbers(monkeypatch: Patch, layout: ScaleLayout) -> None:
    """Guards: layouts told apart by the length of the buffer alone: at 128 rows both have the same."""
    simulate(monkeypatch)
    layer = exact_layer(BACKENDS[TRTLLM](), 128, 512, bias=False)
    (plan,) = (plan for plan in layer.layouts(128) if plan.layout == layout)
    check_exact(layer, 128, [plan])
    told(layout is ScaleLayout.R128C4)(monkeypatch)
    with pytest.raises(NUMBERS):
        check_exact(layer, 128, [plan])


def test_linear_scales_of_one_length_give_other_numbers(monkeypatch: Patch) -> None:
    """Guards: the wrong SfLayout where all three have one length."""
    simulate(monkeypatch)
    layer = exact_layer(BACKENDS[TRTLLM](), 128, 512, bias=False)
    for layout in (ScaleLayout.R8C4, ScaleLayout.R128C4):
        with monkeypatch.context() as patch:
            linear_for(layout)(patch)
            (plan,) = (plan for plan in layer.layouts(128) if plan.layout == layout)
            with pytest.raises(NUMBERS):
                check_exact(layer, 128, [plan])
