"""What a model's config.json declares about how its weights are stored.

Two things cannot be told from a tensor's dtype and shape, so they are taken from the declaration and never
guessed: a weight stored [in, out], and numbers that need a scale of some other format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmwire_service.checkpoint.json_object import read_object
from gemmwire_service.errors import CheckpointError

# Modules that are `transformers.pytorch_utils.Conv1D`, whose weight is [in, out], by model_type.
_GPT2_CONV1D = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
CONV1D_MODULES: Mapping[str, frozenset[str]] = {
    "gpt2": _GPT2_CONV1D,
    "openai-gpt": _GPT2_CONV1D,
    "imagegpt": _GPT2_CONV1D,
    "decision_transformer": _GPT2_CONV1D,
}

# Declarations of MXFP8: each entry lists the keys and values (in lower case) that all have to be there.
MXFP8_DECLARATIONS: tuple[Mapping[str, str], ...] = (
    {"quant_method": "modelopt", "quant_algo": "mxfp8"},
    {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
    {"quant_method": "mxfp8"},
)
# What tells one quantization from another; the message about a foreign one repeats these.
_TELLING_KEYS = (
    "quant_method",
    "quant_algo",
    "format",
    "data_type",
    "fmt",
    "bits",
    "weight_block_size",
    "load_in_4bit",
)


@dataclass(frozen=True)
class Declared:
    """`model_type` as config.json gives it, and the final names of the modules whose weight is [in, out]."""

    model_type: str | None = None
    transposed: frozenset[str] = frozenset()


def read_declared(folder: Path) -> Declared:
    """Reads config.json and hf_quant_config.json in `folder`, where they exist.

    Raises CheckpointError when they declare a quantization other than MXFP8.
    """
    config = _optional(folder / "config.json")
    _check_quantization(config.get("quantization_config"), folder / "config.json")
    _check_modelopt(_optional(folder / "hf_quant_config.json"), folder / "hf_quant_config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return Declared()
    return Declared(model_type, CONV1D_MODULES.get(model_type, frozenset()))


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path, strict=False) if path.exists() else {}


def _check_quantization(declared: Any, source: Path) -> None:
    if not declared:  # absent, null or {}
        return
    if isinstance(declared, dict) and any(_matches(declared, mxfp8) for mxfp8 in MXFP8_DECLARATIONS):
        return
    raise _foreign(declared, source)


def _check_modelopt(config: dict[str, Any], source: Path) -> None:
    """ModelOpt's own file, which some checkpoints have instead of a quantization_config."""
    quantization = config.get("quantization")
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    if algorithm is not None and str(algorithm).lower() != "mxfp8":
        raise _foreign(quantization, source)


def _matches(declared: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    return all(str(declared.get(key)).lower() == value for key, value in wanted.items())


def _foreign(declared: Any, source: Path) -> CheckpointError:
    told = (
        {key: declared[key] for key in _TELLING_KEYS if key in declared}
        if isinstance(declared, dict)
        else declared
    )
    got = repr(told or declared)[:200]
    return CheckpointError(
        f"{source}: declares the quantization {got}. MXFP8 (E4M3 weight, one E8M0 scale per 32 along K) "
        "is read, and BF16, F16 and F32 weights are quantized to it; serve the unquantized model instead",
        expected="MXFP8 or no quantization",
        got=got,
    )
