"""A linear layer on a server as a torch operator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import gemmwire
from gemmwire.nn import client_for, remote_linear, use
from oracle import spread
from serving import Served


@pytest.fixture
def url(server: Served) -> Iterator[str]:
    with gemmwire.Client(server.url) as client:
        yield use(client)
        client_for(client.url)


@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 33), (0, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_operator_is_sound(url: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (spread(6, 33).flatten()[: torch.Size(shape).numel()].view(shape) / 64).to(dtype)
    opcheck(remote_linear, (x, url, "m.ragged", 130))
    y = torch.ops.gemmwire.remote_linear(x, url, "m.ragged", 130)
    assert (y.shape, y.dtype) == ((*shape[:-1], 130), dtype)
    assert torch.equal(y, client_for(url).infer("m.ragged", x))


def test_a_model_that_holds_it_compiles_whole_for_any_m(url: str) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(remote_linear(x + 1, url, "m.ragged", 130)) * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (1, 5, 9):
        x = spread(m, 33) / 64
        assert torch.equal(compiled(x), model(x)), m


def test_another_n_than_the_layers_is_refused(url: str) -> None:
    with pytest.raises(gemmwire.WireError, match="N=130"):
        remote_linear(torch.ones(1, 33), url, "m.ragged", 131)


def test_a_url_has_one_client_until_another_is_given(server: Served) -> None:
    assert client_for(server.url + "/") is client_for(server.url + "/")
    with gemmwire.Client(server.url, timeout=5) as client:
        assert client_for(use(client)) is client
