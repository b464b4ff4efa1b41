"""What a config says about a quantization, in every way that is read, and the ways that are not."""

from __future__ import annotations

from typing import Any

import pytest

from gemmwire_service.checkpoint.schemes import SCHEMES, UNDECLARED, find_scheme
from gemmwire_service.checkpoint.schemes.comfyui import declaration
from gemmwire_service.errors import CheckpointError

MX_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
MX_GROUP = {"targets": ["Linear"], "weights": MX_WEIGHTS, "input_activations": {"num_bits": 8}}


def modelopt(**more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "MXFP8", **more}


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": named,
        **more,
    }


def vendor(**more: Any) -> dict[str, Any]:
    return {"quant_method": "mxfp8", **more}


def blocks(rows: Any = 128, columns: Any = 128, **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [rows, columns], **more}


@pytest.mark.parametrize(
    ("declared", "scales", "block"),
    [
        pytest.param(modelopt(), ("weight_scale",), (1, 32), id="modelopt"),
        pytest.param(
            modelopt(quant_algo="mxfp8", group_size=32), ("weight_scale",), (1, 32), id="lower-case"
        ),
        pytest.param(modelopt(group_size=None), ("weight_scale",), (1, 32), id="no-group-size"),
        pytest.param(
            {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}},
            ("weight_scale",),
            (1, 32),
            id="modelopt-nested",
        ),
        pytest.param(compressed(MX_GROUP), ("weight_scale",), (1, 32), id="compressed-tensors"),
        pytest.param(compressed(), ("weight_scale",), (1, 32), id="compressed-tensors-without-groups"),
        pytest.param(vendor(), ("weight_scale_inv",), (1, 32), id="vendor"),
        pytest.param(
            vendor(weight_block_size=[1, 32], scale_fmt="UE8M0"),
            ("weight_scale_inv",),
            (1, 32),
            id="vendor-all",
        ),
        pytest.param(blocks(), ("weight_scale_inv", "scale"), (128, 128), id="128x128"),
        pytest.param(blocks(32, 32), ("weight_scale_inv", "scale"), (32, 32), id="32x32"),
        pytest.param(blocks(1, 128), ("weight_scale_inv", "scale"), (1, 128), id="1x128"),
    ],
)
def test_a_declaration_names_its_scales_and_their_blocks(
    declared: dict[str, Any], scales: tuple[str, ...], block: tuple[int, int]
) -> None:
    scheme = find_scheme(declared, "config.json")
    assert (scheme.declared, scheme.scales, scheme.block) == (True, scales, block)
    assert sum(each(declared, "config.json") is not None for each in SCHEMES) == 1, "one way to read it"


@pytest.mark.parametrize("declared", [None, {}, [], ""], ids=repr)
def test_nothing_declared_is_a_scheme_too(declared: Any) -> None:
    assert find_scheme(declared, "config.json") is UNDECLARED


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(modelopt(group_size=16), id="modelopt-16"),
        pytest.param(modelopt(quant_algo="MIXED_PRECISION"), id="mixed-without-layers"),
        pytest.param(
            modelopt(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "NVFP4"}}),
            id="mixed-without-mxfp8",
        ),
        pytest.param(compressed(format="float-quantized"), id="fp8-of-compressed-tensors"),
        pytest.param(compressed({**MX_GROUP, "format": "nvfp4-pack-quantized"}), id="other-group"),
        pytest.param(vendor(weight_block_size=[128, 128]), id="vendor-128"),
        pytest.param(vendor(scale_fmt="float"), id="vendor-float-scales"),
        pytest.param(blocks(scale_fmt="float"), id="fp8-float-scales"),
        pytest.param({"quant_method": "fp8", "weight_block_size": [128, 128]}, id="fp8-without-scale-fmt"),
        pytest.param(blocks(128, 16), id="blocks-of-16"),
        pytest.param(blocks(0, 32), id="blocks-of-0-rows"),
        pytest.param(blocks(True, 32), id="blocks-of-true"),
        pytest.param({**blocks(), "weight_block_size": [128]}, id="one-size"),
        pytest.param({**blocks(), "weight_block_size": None}, id="per-tensor"),
    ],
)
def test_another_declaration_is_refused(declared: dict[str, Any]) -> None:
    """Guards: E4M3 numbers that are served under scales of another meaning."""
    with pytest.raises(CheckpointError, match=r"config\.json: declares the quantization"):
        find_scheme(declared, "config.json")


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        pytest.param(modelopt(ignore="lm_head"), "ignore is 'lm_head'; it lists module names", id="no-list"),
        pytest.param(modelopt(exclude_modules=[1]), r"exclude_modules is \[1\]", id="numbers"),
        pytest.param(
            compressed(ignore=["re:("]), r"lists 're:\(', which is no regular expression", id="regex"
        ),
        pytest.param(compressed(config_groups=[MX_GROUP]), "config_groups must map", id="groups-as-list"),
        pytest.param(
            compressed({**MX_GROUP, "weights": {**MX_WEIGHTS, "group_size": 64}}),
            r"mxfp8-quantized with weights \{'group_size': 64\}",
            id="groups-of-64",
        ),
        pytest.param(
            modelopt(quant_algo="MIXED_PRECISION", quantized_layers={"a": "MXFP8"}),
            "quantized_layers must map",
            id="layers-without-objects",
        ),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declared: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{says}"):
        find_scheme(declared, "config.json")


@pytest.mark.parametrize(
    ("declared", "module", "entry"),
    [
        pytest.param(modelopt(ignore=["lm_head"]), "lm_head", "lm_head", id="name"),
        pytest.param(modelopt(ignore=["lm_head"]), "model.lm_head", None, id="whole-name"),
        pytest.param(modelopt(exclude_modules=["*router*"]), "l.0.router.w", "*router*", id="glob"),
        pytest.param(modelopt(exclude_modules=["model.l.0*"]), "model.l.0.q", "model.l.0*", id="prefix-glob"),
        pytest.param(modelopt(exclude_modules=["model.l.1"]), "model.l.1.q", "model.l.1", id="tree"),
        pytest.param(modelopt(exclude_modules=["model.l.1"]), "model.l.10.q", None, id="not-a-prefix"),
        pytest.param(compressed(ignore=["re:.*gate$"]), "l.0.gate", "re:.*gate$", id="regex"),
        pytest.param(compressed(ignore=["re:.*gate$"]), "l.0.gate_proj", None, id="regex-end"),
        pytest.param(vendor(ignored_layers=["l.0"]), "model.l.0.q", "l.0", id="part"),
        pytest.param(vendor(modules_to_not_convert=["l.1"]), "model.l.10.q", None, id="whole-parts"),
        pytest.param(blocks(modules_to_not_convert=["gate"]), "l.0.gate", "gate", id="fp8"),
    ],
)
def test_the_list_of_exclusions_is_matched_as_its_writer_matches_it(
    declared: dict[str, Any], module: str, entry: str | None
) -> None:
    assert find_scheme(declared, "config.json").excluded(module) == entry


def test_a_mixed_checkpoint_says_which_modules_are_of_another_quantization() -> None:
    """Guards: FP8 or NVFP4 tensors of the same checkpoint taken for MXFP8, or refused with all the rest."""
    layers = {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    scheme = find_scheme(modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers), "config.json")
    assert [scheme.other(module) for module in ("a", "b", "c")] == [None, "NVFP4", None]


def test_groups_of_compressed_tensors_are_told_apart_by_their_targets() -> None:
    fp4 = {"targets": ["re:.*experts.*", "b"], "weights": {}, "format": "nvfp4-pack-quantized"}
    scheme = find_scheme(compressed(fp4, MX_GROUP), "config.json")
    assert [scheme.other(module) for module in ("a", "l.experts.0", "b")] == [
        None,
        "nvfp4-pack-quantized",
        "nvfp4-pack-quantized",
    ]
    ours = {**MX_GROUP, "targets": ["a"], "format": "mxfp8-quantized"}
    rest = {"targets": ["Linear"], "format": "float-quantized"}
    scheme = find_scheme(compressed(ours, rest, format="mixed-precision"), "config.json")
    assert [scheme.other(module) for module in ("a", "b")] == [None, "float-quantized"]


@pytest.mark.parametrize("key", ["ignore", "targets"])
def test_an_expression_that_never_ends_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a config that keeps a server busy for the age of the world."""
    monkeypatch.setattr("gemmwire_service.checkpoint.schemes.base.PATIENCE_S", 0.1)
    endless = ["re:(a|a)*$"]
    other = {"targets": endless, "format": "float-quantized"}
    scheme = find_scheme(
        compressed(MX_GROUP, ignore=endless) if key == "ignore" else compressed(other, MX_GROUP),
        "config.json",
    )
    match = scheme.excluded if key == "ignore" else scheme.other
    with pytest.raises(CheckpointError, match=r"^config\.json: lists 're:\(a\|a\)\*\$', and to match it"):
        match("a" * 60 + "!")


def test_expressions_are_those_of_python() -> None:
    """Guards: a list that is matched otherwise than by the library that wrote it."""
    (lookahead,) = ignore = [r"re:^(?!.*\.(q|k)_proj$).*self_attn\.[a-z]+_proj$"]
    excluded = find_scheme(compressed(ignore=ignore), "config.json").excluded
    assert [excluded(f"l.0.self_attn.{part}_proj") for part in "qkvo"] == [None, None, lookahead, lookahead]


def test_comfyui_declares_itself_in_the_header_or_beside_the_weight() -> None:
    assert declaration("m", {"m.weight"}, {}) is None
    assert declaration("m", {"m.weight", "n.comfy_quant"}, {"format": "pt"}) is None
    assert declaration("m", {"m.weight", "m.comfy_quant"}, {}) == "the tensor m.comfy_quant"
    assert "_quantization_metadata" in str(declaration("m", (), {"_quantization_metadata": "{}"}))
