"""Which tensors are linear layers, and the reason given for every other one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gemmwire_service.checkpoint.hf_config import Declared
from gemmwire_service.checkpoint.linear import EMBEDDINGS, Linear, find_linears
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.errors import CheckpointError

Kind = tuple[str, Sequence[int]]
NOTHING, GPT2 = Declared(), Declared("gpt2", frozenset({"c_attn"}))


def find(declared: Declared = NOTHING, /, **tensors: Kind) -> tuple[dict[str, Linear], dict[str, str]]:
    """Layers and reasons. `__` in a keyword stands for the dot of a tensor's name."""
    names = {name.replace("__", "."): kind for name, kind in tensors.items()}
    infos = {name: TensorInfo(name, dtype, tuple(shape), 0, 0) for name, (dtype, shape) in names.items()}
    linears, skipped = find_linears(infos, declared, "model")
    assert len(skipped) + sum(len(linear.parts()) for linear in linears.values()) == len(infos)
    return linears, {each.name: each.reason for each in skipped}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("bias", ["BF16", "F16", "F32", None])
def test_a_float_weight_is_a_layer(dtype: str, bias: str | None) -> None:
    """Guards: a bias left behind because its dtype is not the weight's."""
    extra: dict[str, Kind] = {"m__bias": (bias, [2])} if bias else {}
    linears, skipped = find(m__weight=(dtype, [2, 3]), **extra)

    assert (linears["m"].n, linears["m"].k, linears["m"].bias is not None) == (2, 3, bias is not None)
    assert skipped == {}


@pytest.mark.parametrize("scale", ["U8", "F8_E8M0"])
@pytest.mark.parametrize(("k", "blocks"), [(1, 1), (32, 1), (33, 2), (64, 2)])
def test_an_mxfp8_weight_is_a_layer(scale: str, k: int, blocks: int) -> None:
    linears, _ = find(
        m__weight=("F8_E4M3", [2, k]), m__weight_scale=(scale, [2, blocks]), m__bias=("BF16", [2])
    )
    found = linears["m"]
    assert (found.n, found.k, found.bias is not None, found.scale is not None) == (2, k, True, True)


def test_layers_come_in_natural_order() -> None:
    """Guards: layer 10 before layer 2 in everything that lists layers."""
    shape = ("BF16", [1, 1])
    linears, _ = find(h__10__a__weight=shape, h__2__b__weight=shape, h__2__a__weight=shape, g__weight=shape)
    assert list(linears) == ["g", "h.2.a", "h.2.b", "h.10.a"]


@pytest.mark.parametrize("module", sorted(EMBEDDINGS))
def test_an_embedding_is_not_a_layer(module: str) -> None:
    """Guards: a lookup table of 150,000 rows quantized and served."""
    _, skipped = find(**{f"model__{module}__weight": ("BF16", [7, 4])})
    assert skipped == {f"model.{module}.weight": "is an embedding table: rows are looked up, not multiplied"}


def test_only_the_last_part_of_a_name_makes_an_embedding() -> None:
    """Guards: T5's `shared` as a prefix, BERT's `embeddings.projection`: real linear layers."""
    linears, _ = find(shared__up__weight=("BF16", [7, 4]), embeddings__projection__weight=("BF16", [7, 4]))
    assert sorted(linears) == ["embeddings.projection", "shared.up"]


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        pytest.param("norm__weight", ("F32", [4]), "is 1-D (a vector, as of a norm)", id="norm"),
        pytest.param("scalar__weight", ("F32", []), "is 0-D", id="scalar"),
        pytest.param(
            "conv__weight", ("F32", [4, 3, 2, 2]), "is 4-D (a convolution or stacked experts)", id="conv"
        ),
        pytest.param("a__experts__weight", ("BF16", [8, 4, 4]), "is 3-D (a convolution or", id="experts"),
        pytest.param(
            "m__weight", ("F64", [4, 4]), "is F64, which is not quantized; store it as F32", id="f64"
        ),
        pytest.param("m__weight", ("I8", [4, 4]), "is I8: packed, integer or of another", id="int8"),
        pytest.param("m__weight", ("U8", [4, 2]), "is U8: packed, integer or of another", id="nvfp4"),
        pytest.param("m__weight", ("F8_E5M2", [4, 4]), "is F8_E5M2: packed, integer or of", id="e5m2"),
        pytest.param("m__weight", ("F4", [4, 4]), "is F4: packed, integer or of another", id="f4"),
        pytest.param(
            "m__weight", ("F8_E4M3", [4, 4]), "without a weight_scale; beside it: nothing", id="no-scale"
        ),
        pytest.param("m__weight", ("BF16", [0, 4]), "has no elements: BF16 [0, 4]", id="no-rows"),
        pytest.param("m__weight", ("BF16", [4, 0]), "has no elements: BF16 [4, 0]", id="no-columns"),
        pytest.param(
            "weight", ("BF16", [4, 4]), "names no module; a layer's weight is <module>.weight", id="bare"
        ),
        pytest.param(
            "a__in_proj_weight", ("F32", [12, 4]), "is a bare F32 [12, 4] parameter, not named", id="in-proj"
        ),
        pytest.param(
            "cls_token", ("F32", [1, 1, 4]), "is F32 [1, 1, 4] and not named <module>.weight", id="3-d"
        ),
        pytest.param("m__bias", ("F32", [4]), "is F32 [4] and not named <module>.weight", id="lone-bias"),
        pytest.param("m__qweight", ("I32", [4, 4]), "is I32 [4, 4] and not named <module>.weight", id="gptq"),
        pytest.param("position_ids", ("I64", [1, 8]), "is I64 [1, 8] and not named", id="ids"),
    ],
)
def test_what_is_not_a_layer_is_listed_with_its_reason(name: str, kind: Kind, reason: str) -> None:
    """Guards: a layer missing from the server without a word."""
    linears, skipped = find(**{name: kind})
    assert linears == {}
    assert reason in skipped[name.replace("__", ".")]


def test_an_e4m3_weight_of_another_format_says_what_was_found() -> None:
    _, skipped = find(
        m__weight=("F8_E4M3", [4, 4]), m__weight_scale_inv=("F32", [1, 1]), m__bias=("F32", [4])
    )
    assert skipped["m.weight"] == "is F8_E4M3 without a weight_scale; beside it: bias, weight_scale_inv"
    assert skipped["m.bias"] == "belongs to 'm.weight', which is not served"


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_further_scales_make_it_another_format(dtype: str) -> None:
    """Guards: a second scale that is left out of the product, a factor that no check of shapes would find."""
    extra: dict[str, Kind] = {"m__weight_scale": ("U8", [4, 1])} if dtype == "F8_E4M3" else {}
    linears, skipped = find(m__weight=(dtype, [4, 4]), m__weight_scale_2=("F32", []), **extra)
    assert linears == {}
    assert skipped["m.weight"].startswith(f"is {dtype} with weight_scale_2 beside it")


@pytest.mark.parametrize("scale", ["F32", "BF16", "F16", "F64", "F8_E4M3", "I8"])
def test_scales_that_are_no_exponents_are_refused_by_name(scale: str) -> None:
    """Guards: factors read as exponents, or the reverse: weights 450,000 times too large and no error."""
    with pytest.raises(
        CheckpointError, match=rf"model: tensor 'm\.weight_scale' is {scale} \[2, 1\]; the scales"
    ):
        find(m__weight=("F8_E4M3", [2, 32]), m__weight_scale=(scale, [2, 1]))


@pytest.mark.parametrize("shape", [[1, 2], [2, 2], [3, 1], [2], [2, 1, 1], [128, 4]], ids=str)
def test_scales_of_another_shape_are_refused(shape: list[int]) -> None:
    """Guards: swizzled or padded scales, whose rows would be read from the wrong place."""
    with pytest.raises(CheckpointError, match=r"'m\.weight' is F8_E4M3 \[2, 32\]: needs \[2, 1\]") as error:
        find(m__weight=("F8_E4M3", [2, 32]), m__weight_scale=("U8", shape))
    assert (error.value.expected, error.value.got) == ([2, 1], shape)


@pytest.mark.parametrize("shape", [[3], [1], [2, 1], [1, 2], []], ids=str)
def test_a_bias_of_another_shape_is_refused_naming_both(shape: list[int]) -> None:
    """Guards: a broadcast of the wrong numbers."""
    with pytest.raises(CheckpointError) as error:
        find(m__weight=("BF16", [2, 3]), m__bias=("F32", shape))
    assert f"tensor 'm.bias' is F32 {shape}, and 'm.weight' is BF16 [2, 3]: needs [2]" in str(error.value)


def test_a_bias_of_another_dtype_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tensor 'm\.bias' is F64 \[2\]; a bias is BF16, F16, F32"):
        find(m__weight=("BF16", [2, 3]), m__bias=("F64", [2]))


def test_a_declared_conv1d_is_stored_k_by_n() -> None:
    """Guards: N and K exchanged, which a square weight would not show. Declared, never guessed."""
    tensors: dict[str, Kind] = {"h__0__c_attn__weight": ("F32", [4, 12]), "h__0__c_attn__bias": ("F32", [12])}
    linears, _ = find(GPT2, lm_head__weight=("F32", [9, 4]), **tensors)

    assert (linears["h.0.c_attn"].n, linears["h.0.c_attn"].k, linears["h.0.c_attn"].transposed) == (
        12,
        4,
        True,
    )
    assert (linears["lm_head"].n, linears["lm_head"].k, linears["lm_head"].transposed) == (9, 4, False)


def test_a_conv1d_that_is_not_declared_fails_on_its_bias_and_says_how_to_declare_it() -> None:
    with pytest.raises(
        CheckpointError, match=r"needs \[4\]; a weight stored \[in, out\] needs a config\.json"
    ):
        find(h__c_attn__weight=("F32", [4, 12]), h__c_attn__bias=("F32", [12]))


def test_a_declared_conv1d_in_mxfp8_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'h\.c_attn\.weight' is declared \[in, out\]"):
        find(GPT2, h__c_attn__weight=("F8_E4M3", [32, 64]), h__c_attn__weight_scale=("U8", [64, 1]))


@pytest.mark.parametrize(
    "module",
    ["a/b", "/", "..", ".", "a\nb", "a\0b", "\ud800", pytest.param("a" * 1025, id="long")],
    ids=ascii,
)
def test_a_name_that_no_url_carries_is_refused(module: str) -> None:
    """Guards: a layer that is served and that no request can name."""
    info = TensorInfo(f"{module}.weight", "BF16", (2, 3), 0, 0)
    with pytest.raises(CheckpointError, match="cannot be one segment of a URL") as error:
        find_linears({info.name: info}, NOTHING, "model")
    str(error.value).encode()


def test_only_layers_need_such_a_name() -> None:
    info = TensorInfo("opt/state", "F32", (2,), 0, 0)
    assert find_linears({info.name: info}, NOTHING, "model")[0] == {}
