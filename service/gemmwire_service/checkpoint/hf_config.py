"""What a model's config.json declares about how its weights are stored.

What cannot be told from a tensor's dtype and shape is taken from the declaration and never guessed: a weight
stored [in, out], and what the scales beside a quantized weight mean.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmwire_service.checkpoint.json_object import read_object
from gemmwire_service.checkpoint.schemes import UNDECLARED, Scheme, find_scheme

CONFIG, QUANTIZATION, MODELOPT_CONFIG = "config.json", "quantization_config", "hf_quant_config.json"

# Modules that are `transformers.pytorch_utils.Conv1D`, whose weight is [in, out], by model_type.
_GPT2_CONV1D = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
CONV1D_MODULES: Mapping[str, frozenset[str]] = {
    "gpt2": _GPT2_CONV1D,
    "openai-gpt": _GPT2_CONV1D,
    "imagegpt": _GPT2_CONV1D,
    "decision_transformer": _GPT2_CONV1D,
}


@dataclass(frozen=True)
class Declared:
    """`model_type` as config.json gives it, the final names of the modules whose weight is [in, out], and how
    weights are quantized."""

    model_type: str | None = None
    transposed: frozenset[str] = frozenset()
    scheme: Scheme = UNDECLARED


def read_declared(folder: Path) -> Declared:
    """Reads config.json and hf_quant_config.json in `folder`, where they exist.

    Raises CheckpointError when they declare a quantization that is not read.
    """
    config = _optional(folder / CONFIG)
    scheme = find_scheme(config.get(QUANTIZATION), folder / CONFIG)
    own = _modelopt(_optional(folder / MODELOPT_CONFIG), folder / MODELOPT_CONFIG)
    scheme = scheme if scheme.declared else own
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return Declared(scheme=scheme)
    return Declared(model_type, CONV1D_MODULES.get(model_type, frozenset()), scheme)


def _optional(path: Path) -> dict[str, Any]:
    """{} where there is none. A link that leads nowhere is one: what it declared is not known."""
    return read_object(path, strict=False) if os.path.lexists(path) else {}


def _modelopt(config: dict[str, Any], source: Path) -> Scheme:
    """ModelOpt's own file, which some checkpoints have instead of a quantization_config."""
    quantization = config.get("quantization")
    if not isinstance(quantization, dict) or quantization.get("quant_algo") is None:
        return UNDECLARED
    return find_scheme({**quantization, "quant_method": "modelopt"}, source)
