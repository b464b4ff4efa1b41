"""Which tensors of a checkpoint are linear layers: by names, dtypes, shapes, and what is declared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gemmwire_service.checkpoint.base import Skipped, layer_name, listed, shown
from gemmwire_service.checkpoint.hf_config import Declared
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.checkpoint.scales import check_scale
from gemmwire_service.checkpoint.schemes import Scheme
from gemmwire_service.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
E4M3 = "F8_E4M3"

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
_WEIGHT, _BIAS = ".weight", ".bias"


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
    tensors: Mapping[str, TensorInfo], declared: Declared, source: object, allow_unquantized: bool = False
) -> tuple[dict[str, Linear], tuple[Skipped, ...]]:
    """The layers by name, in natural order (layers.2 before layers.10), and everything else with its reason.

    Float weights of a quantized checkpoint are layers only if `allow_unquantized`. Raises CheckpointError for
    a layer that cannot be right: a bias or scale of the wrong size or dtype, or a name that no URL can carry.
    """
    ordered = sorted(tensors, key=natural_key)
    beside = _siblings(tensors)
    against = {name: _reason_against(tensors[name], beside, declared.scheme) for name in ordered}
    found = [_linear(name, tensors, declared, source) for name in ordered if against[name] is None]
    if not allow_unquantized and (declared.scheme.declared or any(linear.scale for linear in found)):
        against.update(
            {each.weight.name: _left_unquantized(each, declared.scheme) for each in found if not each.scale}
        )
        found = [linear for linear in found if linear.scale]
    used = {part.name for linear in found for part in linear.parts()}
    skipped = (
        Skipped(name, _reason(tensors[name], against[name], beside, declared.scheme))
        for name in ordered
        if name not in used
    )
    return {linear.name: linear for linear in found}, tuple(skipped)


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


def _reason_against(info: TensorInfo, beside: Mapping[str, list[str]], scheme: Scheme) -> str | None:
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
    other = scheme.other(module)
    if other is not None:
        return f"is declared {other[:40]}, which is not MXFP8"
    return _reason_against_dtype(info.dtype, sorted(beside[module]), scheme)


def _reason_against_dtype(dtype: str, beside: list[str], scheme: Scheme) -> str | None:
    scales = [last for last in beside if last.startswith(("weight_", "scale"))]
    if dtype == E4M3:
        own = [last for last in scheme.scales if last in beside]
        if not own:
            found = listed([last for last in beside if last != "weight"])
            return f"is {E4M3} without a {' or '.join(scheme.scales)}; beside it: {found or 'nothing'}"
        scales.remove(own[0])
    elif dtype == "F64":
        return "is F64, which is not quantized; store it as F32"
    elif dtype not in FLOATS:
        return f"is {dtype}: packed, integer or of another quantized format"
    if scales:
        return f"is {dtype} with {listed(scales)} beside it: a scaled or packed weight of another format"
    return None


def _left_unquantized(linear: Linear, scheme: Scheme) -> str:
    """Why a float weight of a quantized checkpoint is not served: its maker chose to keep it as it is."""
    entry = scheme.excluded(linear.name)
    why = f"excluded by {shown(entry)}" if entry is not None else "and not in its list of exclusions"
    return (
        f"is {linear.weight.dtype} in a checkpoint of MXFP8, {why}; "
        "with --allow-unquantized it is quantized at load and served"
    )


def _reason(info: TensorInfo, against: str | None, beside: Mapping[str, list[str]], scheme: Scheme) -> str:
    """Why a tensor is left out, for any tensor that no layer uses."""
    module, _, last = info.name.rpartition(".")
    if last == "weight":
        return against or "belongs to no layer"
    if last in ("bias", *scheme.scales) and "weight" in beside[module]:
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
    scale = _scale(module, tensors, declared.scheme) if weight.dtype == E4M3 else None
    linear = Linear(module, weight, tensors.get(module + _BIAS), scale, transposed)
    _check_bias(linear, source)
    if scale is not None and transposed:
        raise CheckpointError(
            f"{source}: tensor {shown(scale.name)}: {shown(weight.name)} is declared [in, out], and "
            "scales run along [out, in]"
        )
    if scale is not None:
        check_scale(scale, weight, declared.scheme, source)
    return linear


def _scale(module: str, tensors: Mapping[str, TensorInfo], scheme: Scheme) -> TensorInfo:
    return next(tensors[f"{module}.{last}"] for last in scheme.scales if f"{module}.{last}" in tensors)


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
