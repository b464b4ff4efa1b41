"""E4M3 weights with an E8M0 scale for each block of rows and columns, as DeepSeek and transformers write.

`weight` E4M3 [N, K] and `weight_scale_inv` (transformers) or `scale` (DeepSeek) [N/R, K/C]. Repeated over its
R rows and its C/32 blocks of columns, such a scale is that of MXFP8.
quantization_config {quant_method: fp8, scale_fmt: ue8m0, weight_block_size: [R, C]}; without scale_fmt the
scales are any numbers, and the weight is no MXFP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmwire_service.checkpoint.schemes.base import Scheme, names, parts, text
from gemmwire_service.mxfp8.format import BLOCK


def recognize(declared: Mapping[str, Any], source: object) -> Scheme | None:
    if text(declared.get("quant_method")) != "fp8" or text(declared.get("scale_fmt")) != "ue8m0":
        return None
    block = _block(declared.get("weight_block_size"))
    if block is None:
        return None
    excluded = [
        each
        for key in ("modules_to_not_convert", "ignored_layers")
        for each in names(declared.get(key), source, key)
    ]
    return Scheme(
        f"E8M0 scales for blocks of {block[0]}x{block[1]}",
        scales=("weight_scale_inv", "scale"),
        block=block,
        float_scales=True,
        excluded=parts(excluded),
    )


def _block(sizes: Any) -> tuple[int, int] | None:
    """[R, C] if C is a multiple of MXFP8's block; a scale of fewer columns has no equal there."""
    if not isinstance(sizes, list) or len(sizes) != 2:
        return None
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        return None
    return None if sizes[1] % BLOCK else (sizes[0], sizes[1])
