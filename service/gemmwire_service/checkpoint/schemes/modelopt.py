"""MXFP8 as NVIDIA's ModelOpt writes it: `weight` E4M3 [N, K] and `weight_scale` U8 [N, K/32].

    config.json   quantization_config  {quant_method: modelopt, quant_algo: MXFP8, ignore: [...]}
    hf_quant_config.json  quantization {quant_algo: MXFP8, group_size: 32, exclude_modules: [...]}

quant_algo MIXED_PRECISION has `quantized_layers`, a quant_algo for each module that is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmwire_service.checkpoint.schemes.base import Match, Scheme, globs, names, nothing, text
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

_METHOD, _ALGORITHM, _MIXED = "modelopt", "mxfp8", "mixed_precision"


def recognize(declared: Mapping[str, Any], source: object) -> Scheme | None:
    """From a quantization_config. Some checkpoints nest ModelOpt's own file in it."""
    if not text(declared.get("quant_method")).startswith(_METHOD):
        return None
    nested = declared.get("quantization")
    return from_quantization(nested if isinstance(nested, dict) else declared, source)


def from_quantization(declared: Mapping[str, Any], source: object) -> Scheme | None:
    """From the `quantization` of hf_quant_config.json, or a quantization_config with the same keys."""
    algorithm = text(declared.get("quant_algo"))
    excluded = globs(
        names(declared.get("exclude_modules"), source, "exclude_modules")
        + names(declared.get("ignore"), source, "ignore")
    )
    if algorithm == _ALGORITHM and declared.get("group_size", BLOCK) in (BLOCK, None):
        return Scheme("ModelOpt MXFP8", excluded=excluded)
    if algorithm == _MIXED:
        other = _other(declared.get("quantized_layers"), source)
        return (
            None if other is nothing else Scheme("ModelOpt MIXED_PRECISION", excluded=excluded, other=other)
        )
    return None


def _other(layers: Any, source: object) -> Match:
    """The algorithm of the modules that have one other than MXFP8; `nothing` if no module has MXFP8."""
    if not layers:
        return nothing
    if not isinstance(layers, dict) or not all(isinstance(each, dict) for each in layers.values()):
        raise CheckpointError(
            f"{source}: quantized_layers must map module names to objects with a quant_algo"
        )
    algorithms = {name: str(each.get("quant_algo")) for name, each in layers.items()}
    others = {name: each for name, each in algorithms.items() if text(each) != _ALGORITHM}
    return nothing if len(others) == len(algorithms) else others.get
