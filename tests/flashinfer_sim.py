"""A stand-in for the package `flashinfer` 0.7.4 on a CPU: its names, signatures, checks and quirks.

It computes from the bytes as they lie in memory (physical.py), so an operand in the wrong layout gives the
wrong answer here as it would on the GPU, and it refuses what the real functions refuse, where they do.
tests/contract/ holds its signatures and tables against the real package. `sm100.py` puts it in place.

What the real package accepts without a word is accepted too: cute-dsl takes `use_8x4_sf_layout` and reads
128x4 all the same; the length of the weight's scales is checked in the layout of x's; nothing looks at the
contents of a scale buffer, nor, with skip_check, at its length; and below compute capability 10.0 the
quantizer returns what the memory held.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import physical

__version__ = "0.7.4"

SUPPORTED = {
    "cutlass": (100, 103, 107, 110, 120, 121),
    "trtllm": (100, 103, 107),
    "cute-dsl": (100, 103, 107),
    "cutedsl_low_latency": (100, 103, 107),
    "cudnn": (100, 103, 107, 110, 120, 121),
    "b12x": (120, 121),
}
BATCH_INVARIANT = (100, 103, 107)

UNINITIALISED = 0xA7
"""Every byte of what a kernel did not write."""


class BackendSupportedError(Exception):
    pass


class BatchInvariantUnsupportedError(ValueError):
    pass


class SfLayout(IntEnum):
    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


@dataclass
class Machine:
    """The GPU it runs on, what is installed beside it, and the calls that came."""

    capability: int = 100
    cute_dsl: bool = True
    cute_dsl_archs: tuple[int, ...] = (100, 103, 107, 110, 120)
    cute_dsl_breaks: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


MACHINE = Machine()

Function = TypeVar("Function", bound=Callable[..., Any])


def _recorded(function: Function) -> Function:
    """Notes each call with its arguments as the caller named them; positional ones have no name."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        MACHINE.calls.append((function.__name__, {**{f"#{i}": arg for i, arg in enumerate(args)}, **kwargs}))
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


# mm_mxfp8


def _checked(function: Function) -> Function:
    """FlashInfer's decorator `backend_requirement`: checks unless told to skip them, and the table."""

    @wraps(function)
    def wrapper(*args: Any, skip_check: bool = False, **kwargs: Any) -> Any:
        if not skip_check:
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            _check(**bound.arguments)
        return function(*args, **kwargs)

    wrapper.is_backend_supported = _is_backend_supported  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def _is_backend_supported(backend: str, cc: int | None = None) -> bool:
    return backend in SUPPORTED and (cc is None or cc in SUPPORTED[backend])


def _check(backend: str, batch_invariant: bool, **call: Any) -> None:
    if backend == "auto":
        _check_problem(**call)
        if not batch_invariant and not _suits_cutlass(**call):
            raise BackendSupportedError("No suitable auto backends found for mm_mxfp8")
        return
    if not _is_backend_supported(backend, MACHINE.capability):
        raise BackendSupportedError(
            f"mm_mxfp8 does not support backend '{backend}' with capability {MACHINE.capability}"
        )
    _check_problem(**call)
    if not REQUIREMENTS[backend](**call):
        raise ValueError("Problem size is not supported for mm_mxfp8")


def _suits_cutlass(**call: Any) -> bool:
    """What "auto" comes down to: neither trtllm nor cute-dsl is among its candidates."""
    try:
        return _is_backend_supported("cutlass", MACHINE.capability) and _requires_cutlass(**call)
    except ValueError:
        return False


def _check_problem(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype,
    use_8x4_sf_layout: bool,
) -> None:
    """_check_mm_mxfp8_problem_size."""
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"mm_mxfp8 accepts 2d tensors, got {a.shape=} and {b.shape=}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"K dimension mismatch in mm_mxfp8. got {a.shape[1]=}, {b.shape[0]=}")
    if b.shape[1] < 128 or a.shape[1] < 128:
        raise ValueError(
            f"MXFP8 requires n >= 128 and k >= 128 for CUTLASS MXFP8. got {a.shape=}, {b.shape=}"
        )
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} must be a float8_e4m3fn tensor, got {tensor.dtype}")
    # The layout of x's scales, also for the weight's.
    tile_rows = 8 if use_8x4_sf_layout else 128
    _check_scales("a_descale", a_descale, a.shape[0], a.shape[1], tile_rows)
    _check_scales("b_descale", b_descale, b.shape[1], b.shape[0], tile_rows)
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"Unsupported output dtype: {out_dtype}")
    if out is not None:
        _check_out(out, (a.shape[0], b.shape[1]), out_dtype, a.device)


def _check_scales(name: str, scales: Tensor, rows: int, k: int, tile_rows: int) -> None:
    if scales.dtype != torch.uint8:
        raise ValueError(f"{name} must be a uint8 tensor, got {scales.dtype}")
    if scales.ndim == 2:
        return  # each backend refuses it by itself
    expected = (physical.length(rows, k // 32, tile_rows),)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"{name} shape mismatch for swizzled layout. Expected {expected}, got {tuple(scales.shape)}."
        )


def _check_out(out: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(out.shape) != shape:
        raise ValueError(f"Output shape mismatch. Expected {shape}, got {tuple(out.shape)}.")
    if out.device != device:
        raise ValueError(f"Output device mismatch. Expected {device}, got {out.device}.")
    if out.dtype != dtype:
        raise ValueError(f"Output dtype mismatch. Expected {dtype}, got {out.dtype}.")


def _requires_trtllm(
    b: Tensor, a_descale: Tensor, b_descale: Tensor, out_dtype: torch.dtype, **_: Any
) -> bool:
    if out_dtype != torch.bfloat16:
        return False
    if a_descale.ndim != 1 or b_descale.ndim != 1:
        raise ValueError("trtllm mm_mxfp8 requires a_descale and b_descale to be 1D swizzled buffers")
    return b.shape[0] % 256 == 0


def _requires_cutlass(
    a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, use_8x4_sf_layout: bool, **_: Any
) -> bool:
    one_dimensional = a_descale.ndim == 1 and b_descale.ndim == 1
    if MACHINE.capability >= 120:
        aligned = a.shape[1] % 32 == 0 and b.shape[1] % 32 == 0
        return one_dimensional and aligned and not use_8x4_sf_layout
    if use_8x4_sf_layout or not one_dimensional:
        raise ValueError("cutlass mm_mxfp8 requires 1D 128x4-swizzled block scales")
    return True


def _requires_cute_dsl(a_descale: Tensor, b_descale: Tensor, **_: Any) -> bool:
    if a_descale.ndim != 1 or b_descale.ndim != 1:
        raise ValueError("cute_dsl mm_mxfp8 requires swizzled 1D scale tensors")
    if not MACHINE.cute_dsl:
        raise ValueError("CuTe DSL is not available.")
    if MACHINE.capability not in MACHINE.cute_dsl_archs:
        raise ValueError(f"the installed CuTe DSL cannot target {MACHINE.capability}")
    return True


def _not_simulated(**_: Any) -> bool:
    raise NotImplementedError("this backend is not simulated: the service does not use it")


REQUIREMENTS: dict[str, Callable[..., bool]] = {
    "trtllm": _requires_trtllm,
    "cutlass": _requires_cutlass,
    "cute-dsl": _requires_cute_dsl,
    "cutedsl_low_latency": _not_simulated,
    "cudnn": _not_simulated,
    "b12x": _not_simulated,
}


@_recorded
@_checked
def mm_mxfp8(
    a: Tensor,
    b: Tensor,
    a_descale: Tensor,
    b_descale: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    *,
    batch_invariant: bool = False,
) -> Tensor:
    if batch_invariant:
        _check_batch_invariant(a, b, a_descale, b_descale, use_8x4_sf_layout, backend)
    if out is None:
        out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype)
    if a.shape[0] == 0:
        raise RuntimeError("a grid of no blocks: the launch fails, and FlashInfer drops its return code")
    if backend == "trtllm":
        _run_trtllm(a, b, a_descale, b_descale, out, use_8x4_sf_layout)
    else:
        _run_in_order(a, b, a_descale, b_descale, out, aligned=32 if backend == "cutlass" else 16)
    return out


def _run_trtllm(a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, out: Tensor, small: bool) -> None:
    """The weight is the kernel's first operand: shuffled, scales in 128x4 whatever x's are in."""
    weight = b.T
    b_descale = b_descale.T  # of one dimension, which torch warns about
    for name, tensor in (("a", a), ("b", weight), ("out", out)):
        _check_contiguous(name, tensor)
    (m, k), n = a.shape, weight.shape[0]
    tiled = physical.tiled_8x4 if small else physical.tiled_128x4
    scales = physical.scales_at(_bytes(b_descale), physical.tiled_128x4(n, k // 32))
    w = physical.numbers(physical.unshuffled(_bytes(weight)), physical.unshuffled(scales))
    _multiply(a, physical.scales_at(_bytes(a_descale), tiled(m, k // 32)), w, out)


def _run_in_order(
    a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, out: Tensor, aligned: int
) -> None:
    """Rows in order, both scales in 128x4 whatever the caller says they are in."""
    weight = b.T
    for name, tensor in (("a", a), ("b", weight)):
        _check_contiguous(name, tensor)
    (m, k), n = a.shape, weight.shape[0]
    if k % aligned or n % aligned:
        raise RuntimeError(f"Expected k and n to be divisible by {aligned}, but got {k} and {n}")
    scales = physical.scales_at(_bytes(b_descale), physical.tiled_128x4(n, k // 32))
    w = physical.numbers(_bytes(weight), scales)
    _multiply(a, physical.scales_at(_bytes(a_descale), physical.tiled_128x4(m, k // 32)), w, out)


def _multiply(a: Tensor, scales: physical.Bytes, w: physical.Floats, out: Tensor) -> None:
    """The sum in FP32, here in float64 and then rounded, since its order in the kernel is unspecified."""
    y = physical.numbers(_bytes(a), scales) @ w.T
    with np.errstate(over="ignore"):
        out.copy_(torch.from_numpy(y.astype(np.float32)))


def _check_batch_invariant(
    a: Tensor, b: Tensor, a_descale: Tensor, b_descale: Tensor, use_8x4_sf_layout: bool, backend: str
) -> None:
    """prepare_mxfp8_operands."""
    (m, k), n = a.shape, b.shape[1]
    wrong = {
        f"backend={backend!r}": backend != "auto",
        "the 8x4 scale-factor layout": use_8x4_sf_layout,
        f"compute capability {MACHINE.capability}": MACHINE.capability not in BATCH_INVARIANT,
        "an environment without the CuTe DSL": not MACHINE.cute_dsl,
        f"K = {k}, N = {n}": k % 32 != 0 or n % 8 != 0,
        "a row-major (K, N) weight": not b.t().is_contiguous(),
        "a_descale too short": a_descale.numel() < physical.length(m, k // 32, 128),
        "b_descale too short": b_descale.numel() < physical.length(n, k // 32, 128),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise BatchInvariantUnsupportedError(f"batch_invariant=True: gemm.mxfp8 does not support {what}")


def _check_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name} must be contiguous")


def _bytes(tensor: Tensor) -> physical.Bytes:
    array: physical.Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return array


# mxfp8_quantize


@_recorded
def mxfp8_quantize(
    input: Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    sf_swizzle_layout: SfLayout | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    if batch_invariant:
        raise NotImplementedError("its recipe differs at the ends of the range: the service does not use it")
    layout = sf_swizzle_layout
    if layout is None:
        layout = SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
    assert input.shape[-1] % 32 == 0
    assert backend in ("auto", "cuda", "cute-dsl"), (
        f"backend must be 'auto', 'cuda' or 'cute-dsl', got {backend}"
    )
    if backend == "cute-dsl":
        _check_cute_dsl_input(input)
    else:
        _check_cuda_input(input, alignment)
    padded = torch.nn.functional.pad(input, (0, -input.shape[-1] % alignment))
    return _quantize(padded, layout)


def _check_cute_dsl_input(x: Tensor) -> None:
    if not MACHINE.cute_dsl:
        raise RuntimeError("CuTe-DSL backend requested but CuTe-DSL is not available.")
    if MACHINE.cute_dsl_breaks:
        raise RuntimeError(MACHINE.cute_dsl_breaks)
    assert x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def _check_cuda_input(x: Tensor, alignment: int) -> None:
    if not x.is_contiguous():
        raise RuntimeError("input must be contiguous")
    if alignment % 32:
        raise RuntimeError("alignment must be divisible by SF_VEC_SIZE = 32")
    if x.ndim < 2:
        raise RuntimeError("Input should be >=2D tensor.")
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError("mxfp8_quantize only supports input tensor with dtypes fp16/bf16.")


def _quantize(x: Tensor, layout: SfLayout) -> tuple[Tensor, Tensor]:
    k = x.shape[-1]
    m, blocks = x.numel() // k if k else 0, k // 32
    places, size = {
        SfLayout.layout_128x4: (physical.tiled_128x4(m, blocks), physical.length(m, blocks, 128)),
        SfLayout.layout_8x4: (physical.tiled_8x4(m, blocks), physical.length(m, blocks, 8)),
        SfLayout.layout_linear: (physical.linear(m, blocks), m * blocks),
    }[layout]
    if MACHINE.capability < 100 or m == 0:
        codes, scales = np.full((m, k), UNINITIALISED, np.uint8), np.full(size, UNINITIALISED, np.uint8)
    else:
        codes, linear = physical.quantized(x.reshape(m, k).double().numpy())
        scales = physical.placed(linear, places, size)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).view(x.shape), torch.from_numpy(scales)


# Weights


def shuffle_matrix_a(input_tensor: Tensor, epilogue_tile_m: int) -> Tensor:
    assert input_tensor.dim() == 2
    rows = 32 if epilogue_tile_m % 128 == 0 else 16
    assert input_tensor.shape[0] % rows == 0, f"input_tensor.shape[0] must be a multiple of {rows}"
    d = torch.arange(input_tensor.shape[0])
    return input_tensor[d // rows * rows + rows // 8 * (d % 8) + d % rows // 8]


def shuffle_matrix_sf_a(input_tensor: Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> Tensor:
    assert input_tensor.dtype == torch.uint8
    assert input_tensor.dim() == 2
    assert input_tensor.shape[0] % 128 == 0, "input_tensor.shape[0] must be a multiple of 128"
    return block_scale_interleave(shuffle_matrix_a(input_tensor, epilogue_tile_m))


def block_scale_interleave(unswizzled_sf: Tensor, *, out: Tensor | None = None) -> Tensor:
    assert unswizzled_sf.dtype == torch.uint8
    rows, blocks = unswizzled_sf.shape
    size = physical.length(rows, blocks, 128)
    if out is not None and (
        out.dtype != torch.uint8 or tuple(out.shape) != (size,) or not out.is_contiguous()
    ):
        raise ValueError(f"block_scale_interleave out must be a contiguous flat tensor of shape ({size},)")
    flat = torch.from_numpy(physical.placed(_bytes(unswizzled_sf), physical.tiled_128x4(rows, blocks), size))
    return flat if out is None else out.copy_(flat)


# The tuner: nothing to tune, but the contexts are there and know whether they nest.


@dataclass(frozen=True)
class MeasurementPolicy:
    execution_mode: str = "auto"
    cold_l2: bool | None = None
    _timer: str = "auto"
    graph_timing: str | None = None


class ReplayCoverage:
    def __init__(self, max_records: int = 64) -> None:
        self.max_records = max_records
        self.records: list[dict[str, Any]] = []
        self.hits = self.misses = self.skipped = self.dropped_records = 0


@_recorded
@contextmanager
def autotune(
    tune_mode: bool = True,
    cache: str | None = None,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
    cuda_graph_profile_replays: int | None = None,
    tie_tolerance: float | None = None,
) -> Iterator[None]:
    yield


@_recorded
@contextmanager
def autotune_v2(
    mode: str = "tune",
    persistent_cache: bool = True,
    cache_root: Any = None,
    measurement_policy: MeasurementPolicy | None = None,
    *,
    cache_scope: str = "process",
    replay_report: ReplayCoverage | None = None,
    strict_replay: bool = False,
    tuning_buckets: tuple[int, ...] | None = None,
    round_up: bool | None = None,
    skip_ops: str | set[str] | None = None,
) -> Iterator[None]:
    yield


# flashinfer.cute_dsl.availability and flashinfer.batch_invariant


def is_cute_dsl_available() -> bool:
    return MACHINE.cute_dsl


def is_cute_dsl_arch_supported(major: int, minor: int, native_only: bool = False) -> bool:
    return MACHINE.cute_dsl and 10 * major + minor in MACHINE.cute_dsl_archs


def fingerprint(op: str, **dims: Any) -> str:
    archs = [f"sm_{cc}" for cc in BATCH_INVARIANT]
    if dims["arch"] not in archs:
        raise ValueError(f"fingerprint({op!r}) takes arch as one of {archs}, not {dims['arch']!r}")
    return "gemm-mxfp8-kfold-0"
