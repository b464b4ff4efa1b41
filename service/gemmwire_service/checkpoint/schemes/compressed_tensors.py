"""MXFP8 as compressed-tensors and LLM Compressor write it: `weight` E4M3 [N, K], `weight_scale` U8 [N, K/32].

quantization_config {quant_method: compressed-tensors, format: mxfp8-quantized, ignore: [...], config_groups:
{group_0: {targets: [...], weights: {...}, input_activations: {...} or null}}}. With format mixed-precision
each group has a format of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemmwire_service.checkpoint.schemes.base import Match, Scheme, names, nothing, regexes, text
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

FORMAT = "mxfp8-quantized"
# What the weights of a group of this format are. A key that is absent is not a contradiction.
_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": BLOCK,
    "symmetric": True,
    "dynamic": False,
}
_WEIGHT_ONLY = "declared weight-only; here activations are quantized to MXFP8 too"


def recognize(declared: Mapping[str, Any], source: object) -> Scheme | None:
    if text(declared.get("quant_method")) != "compressed-tensors":
        return None
    groups = _groups(declared, source)
    ours = [group for group in groups if _format(group, declared) == FORMAT]
    if not ours and (groups or text(declared.get("format")) != FORMAT):
        return None
    for group in ours:
        _check_weights(group.get("weights"), source)
    weight_only = bool(ours) and not any(group.get("input_activations") for group in ours)
    return Scheme(
        "compressed-tensors MXFP8",
        excluded=regexes(names(declared.get("ignore"), source, "ignore"), source),
        other=_other(groups, declared, source),
        notes=(_WEIGHT_ONLY,) if weight_only else (),
    )


def _groups(declared: Mapping[str, Any], source: object) -> list[dict[str, Any]]:
    groups = declared.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{source}: config_groups must map names to objects with targets and weights")
    return list(groups.values())


def _format(group: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    return text(group.get("format") or declared.get("format"))


def _check_weights(weights: Any, source: object) -> None:
    found = weights if isinstance(weights, dict) else {}
    wrong = {key: found[key] for key, needed in _WEIGHTS.items() if key in found and found[key] != needed}
    if wrong:
        raise CheckpointError(
            f"{source}: declares the format {FORMAT} with weights {repr(wrong)[:200]}; "
            f"its weights are {_WEIGHTS}",
            expected=_WEIGHTS,
            got=repr(wrong)[:200],
        )


def _other(groups: list[dict[str, Any]], declared: Mapping[str, Any], source: object) -> Match:
    """The format of the modules that belong to a group of another one.

    A target is a name, an expression or a class of modules. A module that a name or an expression lists
    belongs to that group; the others belong to the group of a class, which for linear layers is `Linear`.
    """
    listed = [
        (
            _format(group, declared),
            regexes(names(group.get("targets"), source, "targets"), source),
            "Linear" in (group.get("targets") or ()),
        )
        for group in groups
    ]
    if all(form == FORMAT for form, _, _ in listed):
        return nothing
    rest = next((form for form, _, linear in listed if linear), None)

    def other(module: str) -> str | None:
        form = next((form for form, match, _ in listed if match(module) is not None), rest)
        return None if form == FORMAT else form

    return other
