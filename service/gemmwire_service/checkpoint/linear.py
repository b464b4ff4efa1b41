"""Which tensors of a checkpoint are linear layers, told from names, dtypes and shapes alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gemmwire_service.checkpoint.base import Skipped, layer_name, listed, shown
from gemmwire_service.checkpoint.hf_config import Declared
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

FLOATS = ("BF16", "F16", "F32")
E4M3 = "F8_E4M3"
E8M0 = ("U8", "F8_E8M0")  # two names of one thing: exponents in a byte

# Modules whose 2-D weight is looked up by row and not multiplied, by the last part of their name.
EMBEDDINGS = frozenset(
    {
        "embed",
        "embed_in",
        "embed_positions",
        "embed_tokens",
        "embed_tokens_per_layer",
        "embedding",
        "embeddings",
        "pos_embedding",
        "position_embedding",
        "position_embeddings",
        "positions_embed",
        "query_position_embeddings",
        "relative_attention_bias",
        "shared",
        "tok_embeddings",
        "token_embedding",
        "token_type_embeddings",
        "tokens_embed",
        "word_embedding",
        "word_embeddings",
        "wpe",
        "wte",
    }
)
_WEIGHT, _BIAS, _SCALE = ".weight", ".bias", ".weight_scale"


@dataclass(frozen=True)
class Linear:
    """The tensors of one layer. `transposed`: the weight is stored [K, N]."""

    name: str
    weight: TensorInfo
    bias: TensorInfo | None
    scale: TensorInfo | None
    transposed: bool

    @property
    def n(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def k(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(part for part in (self.weight, self.bias, self.scale) if part is not None)


def find_linears(
    tensors: Mapping[str, TensorInfo], declared: Declared, source: object
) -> tuple[dict[str, Linear], tuple[Skipped, ...]]:
    """The layers by name, in natural order (layers.2 before layers.10), and everything else with its reason.

    Raises CheckpointError for a layer that cannot be right: a bias or scale of the wrong size or dtype, or a
    name that no URL can carry.
    """
    ordered = sorted(tensors, key=natural_key)
    beside = _siblings(tensors)
    linears: dict[str, Linear] = {}
    for name in ordered:
        if _reason_against(tensors[name], beside) is None:
            linear = _linear(name, tensors, declared, source)
            linears[linear.name] = linear
    used = {part.name for linear in linears.values() for part in linear.parts()}
    skipped = (Skipped(name, _reason(tensors[name], beside)) for name in ordered if name not in used)
    return linears, tuple(skipped)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts runs of digits by their value."""
    parts = re.split(r"([0-9]{1,18})", name)
    return [(0, int(part)) if index % 2 else (1, part) for index, part in enumerate(parts)]


def _siblings(tensors: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    """The last parts of the tensor names of each module."""
    found: dict[str, list[str]] = {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        found.setdefault(module, []).append(last)
    return found


def _reason_against(info: TensorInfo, beside: Mapping[str, list[str]]) -> str | None:
    """Why this tensor is not the weight of a served layer, or None: it is."""
    module, _, last = info.name.rpartition(".")
    if last != "weight":
        return "is not named <module>.weight"
    if not module:
        return "names no module; a layer's weight is <module>.weight"
    if module.rpartition(".")[2] in EMBEDDINGS:
        return "is an embedding table: rows are looked up, not multiplied"
    if len(info.shape) != 2:
        kind = "a vector, as of a norm" if len(info.shape) == 1 else "a convolution or stacked experts"
        return f"is {len(info.shape)}-D ({kind}); a linear layer's weight is 2-D"
    if 0 in info.shape:
        return f"has no elements: {info}"
    return _reason_against_dtype(info.dtype, sorted(beside[module]))


def _reason_against_dtype(dtype: str, beside: list[str]) -> str | None:
    scales = [last for last in beside if last.startswith(("weight_", "scale"))]
    if dtype == E4M3:
        if "weight_scale" not in beside:
            found = listed([last for last in beside if last != "weight"])
            return f"is {E4M3} without a weight_scale; beside it: {found or 'nothing'}"
        scales.remove("weight_scale")
    elif dtype == "F64":
        return "is F64, which is not quantized; store it as F32"
    elif dtype not in FLOATS:
        return f"is {dtype}: packed, integer or of another quantized format"
    if scales:
        return f"is {dtype} with {listed(scales)} beside it: a scaled or packed weight of another format"
    return None


def _reason(info: TensorInfo, beside: Mapping[str, list[str]]) -> str:
    """Why a tensor is left out, for any tensor that no layer uses."""
    module, _, last = info.name.rpartition(".")
    if last == "weight":
        return _reason_against(info, beside) or "belongs to no layer"
    if last in ("bias", "weight_scale") and "weight" in beside[module]:
        return f"belongs to {shown(module + _WEIGHT)}, which is not served"
    if len(info.shape) == 2 and info.dtype in FLOATS:
        return (
            f"is a bare {info} parameter, not named <module>.weight: which way it multiplies is not known; "
            "save it as [out, in] under such a name to serve it"
        )
    return f"is {info} and not named <module>.weight"


def _linear(name: str, tensors: Mapping[str, TensorInfo], declared: Declared, source: object) -> Linear:
    weight, module = tensors[name], layer_name(name[: -len(_WEIGHT)], source)
    transposed = module.rpartition(".")[2] in declared.transposed
    scale = tensors[module + _SCALE] if weight.dtype == E4M3 else None
    linear = Linear(module, weight, tensors.get(module + _BIAS), scale, transposed)
    _check_bias(linear, source)
    _check_scale(linear, source)
    return linear


def _check_bias(linear: Linear, source: object) -> None:
    bias, weight = linear.bias, linear.weight
    if bias is None:
        return
    where = f"{source}: tensor {shown(bias.name)}"
    if bias.dtype not in FLOATS:
        raise CheckpointError(
            f"{where} is {bias}; a bias is {', '.join(FLOATS)}", expected=FLOATS, got=bias.dtype
        )
    if bias.shape != (linear.n,):
        hint = "" if linear.transposed else "; a weight stored [in, out] needs a config.json that says so"
        raise CheckpointError(
            f"{where} is {bias}, and {shown(weight.name)} is {weight}: needs [{linear.n}]{hint}",
            expected=[linear.n],
            got=list(bias.shape),
        )


def _check_scale(linear: Linear, source: object) -> None:
    scale, weight = linear.scale, linear.weight
    if scale is None:
        return
    where = f"{source}: tensor {shown(scale.name)}"
    if linear.transposed:
        raise CheckpointError(
            f"{where}: {shown(weight.name)} is declared [in, out], and scales run along [out, in]"
        )
    if scale.dtype not in E8M0:
        raise CheckpointError(
            f"{where} is {scale}; the scales of MXFP8 are E8M0 exponents stored as {' or '.join(E8M0)}. "
            "A float scale is another format: serve the unquantized model instead",
            expected=E8M0,
            got=scale.dtype,
        )
    needed = (linear.n, -(-linear.k // BLOCK))
    if scale.shape != needed:
        raise CheckpointError(
            f"{where} is {scale}, and {shown(weight.name)} is {weight}: needs {list(needed)}, one scale per "
            f"{BLOCK} along the last dimension",
            expected=list(needed),
            got=list(scale.shape),
        )
