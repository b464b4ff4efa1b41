"""quantize="client": what is sent, and that the answer is the server's own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch

from gemmwire import AsyncClient, Client, InputError, InvalidArgument
from gemmwire.mxfp8 import quantize
from oracle import spread
from scripted_layer import Computing, Recorded, client
from serving import Served

LAYERS = {"m.plain": 128, "m.ragged": 33, "m.one": 341, "m.wide": 512}


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.int32 if y.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_answer_has_the_bits_of_sending_x_itself(server: Served, layer: str, dtype: torch.dtype) -> None:
    """Guards: an x that is rounded otherwise on its way through the client's quantizer."""
    x = (spread(9, LAYERS[layer]) * 1.01 / 64).to(dtype).view(3, 3, -1)
    with Client(server.url) as c:
        expected = c.infer(layer, x)
        y = c.infer(layer, x, quantize="client")
        assert (y.dtype, y.shape) == (dtype, expected.shape)
        assert torch.equal(bits(y), bits(expected))
        if dtype != torch.bfloat16:
            assert torch.equal(torch.from_numpy(c.infer(layer, x.numpy(), quantize="client")), expected)


def test_a_row_that_is_not_finite_is_nan(server: Served) -> None:
    x = spread(4, 128)
    x[1, 7], x[2, 100] = float("nan"), float("-inf")
    with Client(server.url, quantize="client") as c:
        assert c.infer("m.plain", x).isnan().all(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("shape", [(33,), (0, 33), (2, 0, 33)], ids=str)
def test_leading_dimensions(server: Served, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    with Client(server.url) as c:
        y = c.infer("m.ragged", x, quantize="client", output_dtype="BF16")
        assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, (*shape[:-1], 130))


def test_what_is_sent_is_codes_scales_and_nothing_else() -> None:
    """Guards: x sent beside its own codes."""
    transport = Recorded(400, {"error": "no"})
    x = torch.ones(6, 64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="no"):
        client(transport, quantize="client").infer("a", x)
    head, codes, scales = transport.requests[0].body
    inputs = json.loads(bytes(head))["inputs"]
    assert [(each["name"], each["datatype"], each["shape"]) for each in inputs] == [
        ("x_e4m3", "UINT8", [6, 64]),
        ("x_scale_e8m0", "UINT8", [6, 2]),
    ]
    expected = quantize(x)
    assert bytes(codes) == expected[0].numpy().tobytes()
    assert bytes(scales) == expected[1].numpy().tobytes()


def test_the_client_s_choice_and_the_call_s() -> None:
    """Guards: a setting that a call cannot take back."""
    transport = Computing()
    x = np.ones((1, 4), np.float32)
    client(transport, quantize="client").infer("a", x, quantize="server")
    assert len(transport.requests[0].body) == 2


def test_many_and_async(server: Served) -> None:
    x = spread(3, 33)
    with Client(server.url) as c:
        expected = c.infer("m.ragged", x)
        for y in c.infer_many([("m.ragged", x)] * 3, quantize="client"):
            assert torch.equal(y, expected)

    async def run() -> Any:
        async with AsyncClient(server.url, quantize="client") as c:
            return [await c.infer("m.ragged", x), *await c.infer_many([("m.ragged", x)])]

    for y in asyncio.run(run()):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("quantize", ["Client", "", None, True])
def test_a_choice_that_is_none_is_refused(quantize: Any) -> None:
    with pytest.raises(InvalidArgument, match="quantize is"):
        Client(quantize=quantize)
    if quantize is not None:
        with pytest.raises(InvalidArgument, match="quantize is"):
            Client().infer("a", np.ones((1, 4), np.float32), quantize=quantize)


def test_what_cannot_be_quantized_is_refused() -> None:
    for x in (np.ones((1, 32)), torch.ones(1, 32, requires_grad=True), memoryview(bytes(8)).cast("f")):
        with pytest.raises(InputError):
            client(Computing()).infer("a", x, quantize="client")
