"""A layer's weight from the bytes of a request: exactly the tensors it takes, or a refusal that says why."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.safetensors_body import HEADER_LIMIT, largest, read_weights
from http_calls import raw
from oracle import spread
from safetensors_bytes import container, entry, frame

N, K = 5, 40
PLAIN, BIASED = LayerSpec("l", N, K, bias=False), LayerSpec("l", N, K, bias=True)
W = spread(N, K)
B = torch.arange(N) / 4
FORMAT = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def body(raw: bytes) -> memoryview:
    """As it comes: memory that can be written."""
    return memoryview(bytearray(raw))


def same(one: MxWeight, other: MxWeight) -> bool:
    return raw(one.codes) == raw(other.codes) and raw(one.scales) == raw(other.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_float_weight_is_quantized_from_its_own_dtype(dtype: torch.dtype) -> None:
    """Guards: FP32 by way of BF16; a bias that stays in its dtype."""
    w = W.to(dtype)
    read = read_weights(body(save({"weight": w, "bias": B.to(dtype)})), BIASED)
    assert same(read.weight, MxWeight.from_float(w))
    assert (read.source_dtype, read.probe is not None) == (FORMAT[dtype], True)
    assert read.weight.bias is not None
    assert (read.weight.bias.dtype, read.weight.bias.tolist()) == (torch.float32, B.tolist())


@pytest.mark.parametrize("scale_dtype", ["U8", "F8_E8M0"])
def test_quantized_bytes_are_taken_as_they_are(scale_dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 0x7F, (N, K), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (N, 2), dtype=torch.uint8, generator=generator)
    read = read_weights(
        body(
            container(
                {
                    "weight_scale": (scale_dtype, (N, 2), raw(scales)),  # weight then lies at an odd address
                    "weight": ("F8_E4M3", (N, K), raw(codes)),
                }
            )
        ),
        PLAIN,
    )
    assert raw(read.weight.codes[:, :K]) == raw(codes)
    assert raw(read.weight.scales) == raw(scales)
    assert (read.source_dtype, read.probe) == ("MXFP8", None)


@pytest.mark.parametrize("odd", range(1, 8))
def test_tensors_may_lie_at_any_address(odd: int) -> None:
    """Guards: a header whose length is no multiple of an element, as other writers leave it."""
    header = json.dumps(
        {"weight": entry("F32", [N, K], 0, 4 * N * K), "bias": entry("F32", [N], 4 * N * K, 4 * N * (K + 1))}
    ).encode()
    read = read_weights(body(frame(header + b" " * odd, raw(W) + raw(B))), BIASED)
    assert same(read.weight, MxWeight.from_float(W))
    assert read.weight.bias is not None
    assert read.weight.bias.tolist() == B.tolist()


GOOD = save({"weight": W})
NAN = W.clone()
NAN[3, 7] = float("nan")
CODES, SCALES = bytes(N * K), bytes([127] * N * 2)
WRONG = {
    "nothing": (b"", "is empty"),
    "no-file": (b"PK\x03\x04" + bytes(60), "a header of .* is declared"),
    "no-json": (frame(b"[1, 2]  "), "does not|begins with"),
    "header-not-closed": (frame(b'{"weight": '), "header"),
    "header-key-twice": (frame(b'{"weight": 1, "weight": 2}'), "twice"),
    "header-too-long": (frame(b"{" + b" " * HEADER_LIMIT + b"}"), "a header of 65538 bytes is declared"),
    "header-beyond-the-end": ((1 << 40).to_bytes(8, "little") + b"{}", "header of 1099511627776 bytes"),
    "nested": (frame(b'{"a":' * 5000 + b"1" + b"}" * 5000), "header"),
    "one-byte-short": (GOOD[:-1], "truncated"),
    "one-byte-more": (GOOD + b"\0", "belong to no tensor"),
    "no-tensor": (frame(b"{}"), "there is no tensor 'weight'"),
    "another-name": (save({"w": W}), "tensors 'w' are not of one layer's weight"),
    "one-too-many": (save({"weight": W, "extra": B}), "tensors 'extra' are not"),
    "a-path-as-name": (save({"weight": W, "../../etc": B}), "tensors '../../etc' are not"),
    "transposed": (save({"weight": W.T.contiguous()}), r"weight is F32 \[40, 5\]; .* \[5, 40\] is needed"),
    "vector": (save({"weight": W.reshape(-1)}), r"weight is F32 \[200\]"),
    "f64": (save({"weight": W.double()}), "weight is F64"),
    "integers": (save({"weight": W.to(torch.int8)}), "weight is I8"),
    "huge-shape": (frame({"weight": entry("F32", [1 << 62, 1 << 62], 0, 0)}), "takes"),
    "nan": (save({"weight": NAN}), r"weight\[3, 7\] is nan"),
    "bias-not-wanted": (save({"weight": W, "bias": B}), "there is a bias, and the layer has none"),
    "codes-without-scale": (container({"weight": ("F8_E4M3", (N, K), CODES)}), "without a weight_scale"),
    "scale-of-a-float": (
        container({"weight": ("F32", (N, K), raw(W)), "weight_scale": ("U8", (N, 2), SCALES)}),
        "and there is a weight_scale",
    ),
    "float-scale": (
        container({"weight": ("F8_E4M3", (N, K), CODES), "weight_scale": ("F32", (N, 2), bytes(8 * N))}),
        "weight_scale is F32",
    ),
    "padded-scale": (
        container({"weight": ("F8_E4M3", (N, K), CODES), "weight_scale": ("U8", (128, 4), bytes(512))}),
        r"weight_scale is U8 \[128, 4\]; .* \[5, 2\] is needed",
    ),
    "nan-code": (
        container(
            {"weight": ("F8_E4M3", (N, K), b"\x7f" + CODES[1:]), "weight_scale": ("U8", (N, 2), SCALES)}
        ),
        "0x7f, which is the NaN of E4M3",
    ),
    "nan-scale": (
        container(
            {"weight": ("F8_E4M3", (N, K), CODES), "weight_scale": ("U8", (N, 2), SCALES[:-1] + b"\xff")}
        ),
        "0xff, which is the NaN of E8M0",
    ),
}


@pytest.mark.parametrize(("raw_body", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_weight_of_the_layer_is_refused(raw_body: bytes, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_weights(body(raw_body), PLAIN)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        pytest.param({"weight": W}, r"there is no bias, and the layer has one: send F32 \[5\]", id="missing"),
        pytest.param({"weight": W, "bias": B[:4].clone()}, r"bias is F32 \[4\]", id="shape"),
        pytest.param({"weight": W, "bias": B.double()}, "bias is F64", id="dtype"),
        pytest.param({"weight": W, "bias": torch.full((N,), torch.inf)}, r"bias\[0\] is inf", id="inf"),
    ],
)
def test_a_bias_belongs_to_a_layer_that_has_one(tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_weights(body(save(tensors)), BIASED)


def test_a_body_that_is_damaged_anywhere_is_read_or_refused() -> None:
    """Guards: an exception of json, struct or torch where a refusal is needed."""
    generator = random.Random(1)
    good = save({"weight": W, "bias": B})
    for _ in range(300):
        damaged = bytearray(good[: generator.randrange(len(good) + 1)] if generator.random() < 0.3 else good)
        for _ in range(generator.randrange(4)):
            if damaged:
                damaged[generator.randrange(min(len(damaged), 200))] = generator.randrange(256)
        try:
            read_weights(memoryview(damaged), BIASED)
        except CheckpointError:
            continue


def test_the_largest_body_holds_the_layer_in_fp32() -> None:
    """Guards: a limit that refuses what a client sends, or lets through what no layer takes."""
    assert len(save({"weight": W, "bias": B})) <= largest(BIASED) <= 4 * N * (K + 1) + HEADER_LIMIT + 8
