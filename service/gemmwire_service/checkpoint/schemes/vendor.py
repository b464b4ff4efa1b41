"""MXFP8 as SGLang and some vendors write it: `weight` E4M3 [N, K] and `weight_scale_inv` U8 [N, K/32].

The name is that of DeepSeek's blocks; what it holds is the scale and not its inverse.
quantization_config {quant_method: mxfp8, weight_block_size: [1, 32], scale_fmt: ue8m0, ignored_layers or
modules_to_not_convert: [...]}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmwire_service.checkpoint.schemes.base import Scheme, names, parts, text
from gemmwire_service.mxfp8.format import BLOCK


def recognize(declared: Mapping[str, Any], source: object) -> Scheme | None:
    if text(declared.get("quant_method")) != "mxfp8":
        return None
    if declared.get("weight_block_size", [1, BLOCK]) not in ([1, BLOCK], None):
        return None
    if text(declared.get("scale_fmt", "ue8m0")) != "ue8m0":
        return None
    excluded = [
        each
        for key in ("ignored_layers", "modules_to_not_convert")
        for each in names(declared.get(key), source, key)
    ]
    return Scheme("MXFP8 with weight_scale_inv", scales=("weight_scale_inv",), excluded=parts(excluded))
