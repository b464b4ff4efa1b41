"""x as E4M3 codes and E8M0 scales: the answer of the same rows in BF16, bit for bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import SHAPES
from gemmwire.mxfp8 import quantize
from http_calls import TORCH, infer, message, raw
from oracle import spread
from serving import Served

Tensors = dict[str, Tensor]


def quantized(x: Tensor, **extra: Any) -> tuple[bytes, int]:
    codes, scales = quantize(x, marked=True)
    return packed({"x_e4m3": codes, "x_scale_e8m0": scales}, **extra)


def packed(tensors: Tensors, datatypes: dict[str, str] | None = None, **extra: Any) -> tuple[bytes, int]:
    """A binary request of these inputs in this order."""
    inputs = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "datatype": (datatypes or {}).get(name, "UINT8"),
            "parameters": {"binary_data_size": tensor.numel() * tensor.element_size()},
        }
        for name, tensor in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}} | extra).encode()
    return head + b"".join(map(raw, tensors.values())), len(head)


@pytest.mark.parametrize("layer", SHAPES)
@pytest.mark.parametrize("m", [1, 7, 129])
def test_the_answer_is_that_of_bf16(server: Served, layer: str, m: int) -> None:
    """Guards: a scale at the wrong block, a ragged K, and rows that are rounded once more."""
    x = spread(m, SHAPES[layer][1], seed=m).bfloat16()
    expected = infer(server, f"m.{layer}", *message(x))
    for _ in range(2):  # the second time from what the server remembers of the JSON part
        reply = infer(server, f"m.{layer}", *quantized(x))
        assert reply.status == 200, reply.body
        assert reply.json["outputs"][0]["datatype"] == "BF16"
        assert torch.equal(reply.tensor.view(torch.int16), expected.tensor.view(torch.int16))


def test_numbers_change_under_a_json_part_that_stays(server: Served) -> None:
    """Guards: the scales of an earlier request beside the codes of this one."""
    for seed in range(4):
        x = spread(3, 128, seed=seed).bfloat16()
        got = infer(server, "m.plain", *quantized(x)).tensor
        assert torch.equal(got, infer(server, "m.plain", *message(x)).tensor), seed


@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
def test_y_comes_in_the_datatype_that_is_asked_for(server: Served, dtype: str) -> None:
    x = (spread(5, 33) / 64).bfloat16()
    asked = [{"name": "y", "parameters": {"datatype": dtype, "binary_data": True}}]
    got = infer(server, "m.ragged", *quantized(x, outputs=asked)).tensor
    assert got.dtype == TORCH[dtype]
    assert torch.equal(got, infer(server, "m.ragged", *message(x, outputs=asked)).tensor)


def test_either_order_of_the_inputs(server: Served) -> None:
    """Guards: scales taken for codes, the second time too."""
    x = spread(4, 128).bfloat16()
    codes, scales = quantize(x)
    expected = infer(server, "m.plain", *message(x)).tensor
    for _ in range(3):
        got = infer(server, "m.plain", *packed({"x_scale_e8m0": scales, "x_e4m3": codes})).tensor
        assert torch.equal(got, expected)


def test_as_json(server: Served) -> None:
    x = spread(2, 33).bfloat16()
    inputs = [
        {"name": name, "shape": list(part.shape), "datatype": "UINT8", "data": part.flatten().tolist()}
        for name, part in zip(("x_e4m3", "x_scale_e8m0"), quantize(x), strict=True)
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    assert torch.equal(infer(server, "m.ragged", head).tensor, infer(server, "m.ragged", *message(x)).tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(server: Served, value: float) -> None:
    """Guards: a NaN that the quantizer turned into 448, and nobody hears of."""
    x = spread(5, 128).bfloat16()
    x[3, 70] = value
    expected = infer(server, "m.plain", *message(x)).tensor
    got = infer(server, "m.plain", *quantized(x)).tensor
    others = [0, 1, 2, 4]
    assert torch.equal(got[others].view(torch.int16), expected[others].view(torch.int16))
    assert got[others].isfinite().all()
    assert got[3].isnan().all()
    assert expected[3].isnan().all()


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33), (33,), (2, 3, 33)], ids=str)
def test_leading_dimensions(server: Served, shape: tuple[int, ...]) -> None:
    x = spread(6, 33).flatten()[: torch.Size(shape).numel()].view(shape).bfloat16()
    got = infer(server, "m.ragged", *quantized(x))
    assert got.json["outputs"][0]["shape"] == [*shape[:-1], 130]
    assert torch.equal(got.tensor, infer(server, "m.ragged", *message(x)).tensor)


C, S = torch.zeros(2, 128, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)

WRONG: dict[str, tuple[Tensors, dict[str, str], str, str]] = {
    "no-scales": ({"x_e4m3": C}, {}, "input_missing", "Input 'x_scale_e8m0' is missing"),
    "no-codes": ({"x_scale_e8m0": S}, {}, "input_missing", "Input 'x_e4m3' is missing"),
    "x-too": (
        {"x_e4m3": C, "x_scale_e8m0": S, "x": C.bfloat16()},
        {"x": "BF16"},
        "input_unexpected",
        "Input 'x' is not one",
    ),
    "signed": ({"x_e4m3": C, "x_scale_e8m0": S}, {"x_e4m3": "INT8"}, "dtype_unsupported", "is INT8"),
    "float-scales": (
        {"x_e4m3": C, "x_scale_e8m0": S.half()}, {"x_scale_e8m0": "FP16"}, "dtype_unsupported", "is FP16"
    ),
    "k": ({"x_e4m3": C[:, :96], "x_scale_e8m0": S}, {}, "k_mismatch", "must be 128"),
    "scalar": ({"x_e4m3": C[0, 0], "x_scale_e8m0": S}, {}, "rank_unsupported", "no dimensions"),
    "few-scales": ({"x_e4m3": C, "x_scale_e8m0": S[:, :3]}, {}, "shape_invalid", "[2, 4] is needed"),
    "many-scales": ({"x_e4m3": C, "x_scale_e8m0": S.repeat(1, 2)}, {}, "shape_invalid", "[2, 4] is needed"),
    "transposed": ({"x_e4m3": C, "x_scale_e8m0": S.T}, {}, "shape_invalid", "[2, 4] is needed"),
    "flat-scales": ({"x_e4m3": C, "x_scale_e8m0": S.flatten()}, {}, "shape_invalid", "[2, 4] is needed"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "datatypes", "code", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_quantized_x_is_refused(
    server: Served, tensors: Tensors, datatypes: dict[str, str], code: str, words: str
) -> None:
    """Guards: scales in another layout taken for linear ones."""
    reply = infer(server, "m.plain", *packed(tensors, datatypes))
    assert (reply.status, reply.json["code"]) == (400, code)
    assert words in reply.json["error"]
