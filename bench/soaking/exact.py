"""Layers, the weights that take turns in them, and requests whose answers are known to the bit.

All numbers are those of tests/oracle.py `sparse`: exact in E4M3, and their sums exact in FP32 in any order.
So y is the float64 product, rounded once to BF16, whatever batch the rows were computed in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save, save_file
from torch import Tensor

from oracle import rounded_once, sparse

MODEL, GUEST = "steady", "guest"
ROWS = (1, 16, 64)
WEIGHTS = 3
XS = 4


@dataclass(frozen=True)
class Shape:
    n: int
    k: int
    bias: bool = False


SHAPES = {f"{MODEL}.square": Shape(1024, 1024), f"{MODEL}.ragged": Shape(130, 333, True)}
GUESTS = {f"{GUEST}.layer": Shape(256, 96)}


@dataclass(frozen=True)
class Form:
    """How a request is written. `share`: of the requests that are sent, in parts of all forms together."""

    name: str
    share: int
    datatype: str = "BF16"
    json: bool = False
    raw: bool = False
    rows: tuple[int, ...] = ROWS


FORMS = (
    Form("binary", 40),
    Form("binary FP32", 20, datatype="FP32"),
    Form("raw", 25, raw=True),
    Form("JSON", 15, json=True, rows=(1, 1, 1, 16)),
)
TORCH = {"BF16": torch.bfloat16, "FP32": torch.float32}


@dataclass(frozen=True)
class Request:
    """`expected`: the bytes of y in `datatype`, by the index of the weight."""

    layer: str
    form: str
    rows: int
    share: float
    sent: bytes
    datatype: str
    expected: tuple[bytes, ...]


def weights(layer: str, shape: Shape) -> list[dict[str, Tensor]]:
    """The tensors of the layer, once for each weight."""
    found = []
    for index in range(WEIGHTS):
        generator = torch.Generator().manual_seed(1000 * index + len(layer))
        found.append({"weight": sparse(shape.n, shape.k, generator)})
        if shape.bias:
            found[-1]["bias"] = sparse(1, shape.n, generator)[0]
    return found


def bodies(layer: str, shape: Shape) -> list[bytes]:
    """A refit's body for each weight."""
    return [
        save({name: tensor.to(torch.bfloat16) for name, tensor in each.items()})
        for each in weights(layer, shape)
    ]


def write_models(root: Path) -> None:
    """Both models as folders of the root, with the first weight of each layer."""
    for model, shapes in ((MODEL, SHAPES), (GUEST, GUESTS)):
        (root / model).mkdir()
        tensors = {
            f"{layer.partition('.')[2]}.{name}": tensor
            for layer, shape in shapes.items()
            for name, tensor in weights(layer, shape)[0].items()
        }
        save_file(tensors, root / model / "model.safetensors")


def requests(shapes: dict[str, Shape] = SHAPES) -> list[Request]:
    found = []
    for layer, shape in shapes.items():
        all_weights = weights(layer, shape)
        for form in FORMS:
            share = form.share / len(form.rows) / XS / len(shapes)
            for place, rows in enumerate(form.rows):
                for seed in range(XS):
                    x = sparse(rows, shape.k, torch.Generator().manual_seed(100 * rows + 10 * place + seed))
                    found.append(request(layer, form, x, share, all_weights))
    return found


def request(layer: str, form: Form, x: Tensor, share: float, all_weights: list[dict[str, Tensor]]) -> Request:
    expected = tuple(answers(x, each, TORCH[form.datatype]) for each in all_weights)
    return Request(layer, form.name, len(x), share, message(layer, form, x), form.datatype, expected)


def answers(x: Tensor, tensors: dict[str, Tensor], dtype: torch.dtype) -> bytes:
    y = x.double() @ tensors["weight"].double().T
    if "bias" in tensors:
        y = y + tensors["bias"].double()
    return as_bytes(rounded_once(y).to(dtype))


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def message(layer: str, form: Form, x: Tensor) -> bytes:
    """The whole HTTP request."""
    data = as_bytes(x.to(TORCH[form.datatype]))
    tensor = {"name": "x", "shape": list(x.shape), "datatype": form.datatype}
    if form.raw:
        return post(layer, data, 0)
    if form.json:
        return post(layer, json.dumps({"inputs": [tensor | {"data": x.tolist()}]}).encode())
    head = json.dumps(
        {
            "inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return post(layer, head + data, len(head))


def post(layer: str, body: bytes, json_size: int | None = None, *headers: str) -> bytes:
    fields = [f"POST /v2/models/{layer}/infer HTTP/1.1", "Host: soak", *headers]
    if json_size is not None:
        fields.append(f"Inference-Header-Content-Length: {json_size}")
    return with_body(fields, body)


def with_body(fields: list[str], body: bytes) -> bytes:
    return "\r\n".join([*fields, f"Content-Length: {len(body)}", "", ""]).encode() + body


def in_proportion(found: list[Request]) -> Iterator[tuple[Request, float]]:
    """Each with the sum of the shares up to it, of 1."""
    total, so_far = sum(each.share for each in found), 0.0
    for each in found:
        so_far += each.share
        yield each, so_far / total
