"""The config that says how the weights are quantized, in the words of each format. One function a format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemmwire_service import __version__
from gemmwire_service.checkpoint.hf_config import CONFIG, MODELOPT_CONFIG, QUANTIZATION
from gemmwire_service.checkpoint.json_object import read_object
from gemmwire_service.mxfp8.format import BLOCK

Files = dict[str, dict[str, Any]]
"""File name -> what it holds."""

# SGLang reads hf_quant_config.json only from a producer whose name begins so: it names the schema.
_PRODUCER = {"name": "modelopt", "version": f"gemmwire {__version__}"}
_COMPRESSED_TENSORS = "0.20.1"  # the version whose schema is written


def modelopt(config: dict[str, Any], excluded: Sequence[str]) -> Files:
    """As `export_hf_checkpoint` of ModelOpt writes it."""
    declared = {
        "ignore": list(excluded),
        "quant_algo": "MXFP8",
        "producer": _PRODUCER,
        "quant_method": "modelopt",
    }
    own = {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": "MXFP8",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(excluded),
        },
    }
    return {CONFIG: {**config, QUANTIZATION: declared}, MODELOPT_CONFIG: own}


def compressed_tensors(config: dict[str, Any], excluded: Sequence[str]) -> Files:
    """As `ModelCompressor.update_config` of compressed-tensors writes its preset MXFP8."""
    weights = {
        "dynamic": False,
        "group_size": BLOCK,
        "num_bits": 8,
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
    }
    group = {
        "format": "mxfp8-quantized",
        "input_activations": {**weights, "dynamic": True},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    declared = {
        "config_groups": {"group_0": group},
        "format": "mxfp8-quantized",
        "global_compression_ratio": None,
        "ignore": list(excluded),
        "kv_cache_scheme": None,
        "moe_sparsity_config": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _COMPRESSED_TENSORS,
    }
    return {CONFIG: {**config, QUANTIZATION: declared}}


DECLARATIONS: Mapping[str, Callable[[dict[str, Any], Sequence[str]], Files]] = {
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
}


def declare(source: Path, folder: Path, form: str, excluded: Sequence[str]) -> None:
    """Writes into `folder` the config.json of `source` with the declaration, and what else belongs to it."""
    path = source / CONFIG
    config = read_object(path, strict=False) if path.exists() else {}
    for name, content in DECLARATIONS[form](config, excluded).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
