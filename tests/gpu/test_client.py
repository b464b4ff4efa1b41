"""The client with tensors on a GPU: its quantizer there, and y on x's device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gemmwire import Client, wire
from gemmwire.errors import GemmwireError
from gemmwire.http1 import Reply, Request
from gemmwire.mxfp8 import quantize
from gemmwire.nn import RemoteLinear
from on_gpu import goldens

pytestmark = pytest.mark.gpu


class Echo:
    """A server whose layers answer x, and which keeps what came."""

    def __init__(self) -> None:
        self.inputs: list[tuple[wire.Tensor, ...]] = []

    def send(self, request: Request, timeout: float | None) -> Reply:
        body = b"".join(request.body)
        headers = dict(request.headers)
        asked = wire.decode_request(body, wire.header_length(headers.get(wire.HEADER_LENGTH), len(body)))
        self.inputs.append(asked.inputs)
        x = asked.inputs[0]
        tensor = wire.Tensor("y", x.datatype, x.shape, x.data)
        fields, buffers = wire.encode_response(wire.InferResponse("a", "1", (tensor,)), [True])
        return Reply(200, fields, bytearray(b"".join(buffers)))

    def send_all(
        self, requests: Sequence[Request], timeout: float | None, at_once: int
    ) -> list[Reply | GemmwireError]:
        return [self.send(request, timeout) for request in requests]

    def close(self) -> None:
        pass


def test_every_golden_block(device: torch.device) -> None:
    """Guards: a cast or a division of the GPU that rounds otherwise."""
    x, codes, scales = goldens()
    for rows in (x, x.reshape(1, -1)):
        got_codes, got_scales = quantize(rows.to(device))
        assert got_codes.device.type == got_scales.device.type == device.type
        wrong = (got_codes.cpu().view(-1, 32) != codes).any(-1) | (got_scales.cpu().view(-1) != scales)
        assert not wrong.any(), f"{int(wrong.sum())} blocks differ, first {x[wrong][0].tolist()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_y_is_on_x_s_device(device: torch.device, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 64, device=device).to(dtype)
    y = Client(transport=Echo()).infer("a", x.transpose(0, 1))
    assert (y.device, y.dtype) == (x.device, dtype)
    assert torch.equal(y, x.transpose(0, 1))


def test_codes_leave_the_device_and_not_x(device: torch.device) -> None:
    """Guards: four bytes an element over PCIe, to be quantized by the CPU."""
    echo = Echo()
    x = torch.randn(4, 96, device=device)
    with pytest.raises(GemmwireError, match="y is UINT8"):  # the echo's
        Client(transport=echo).infer("a", x, quantize="client")
    expected: tuple[Tensor, Tensor] = quantize(x.cpu())
    for sent, right in zip(echo.inputs[0], expected, strict=True):
        assert bytes(sent.data) == right.numpy().tobytes()


def test_a_remote_linear_follows_its_x_and_autocast(device: torch.device) -> None:
    linear = RemoteLinear(
        Client("http://gpu.test:1", transport=Echo()), "a", in_features=32, out_features=32, bias=False
    )
    x = torch.randn(2, 32, device=device)
    assert torch.equal(linear(x), x)
    with torch.autocast(device.type, torch.bfloat16):
        y = linear(x)
    assert (y.dtype, y.device) == (torch.bfloat16, x.device)
    assert torch.equal(y, x.bfloat16())
