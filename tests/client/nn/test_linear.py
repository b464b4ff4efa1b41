"""RemoteLinear in the place of nn.Linear."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import gemmwire
from gemmwire import Client, InputError, InvalidArgument
from gemmwire.nn import RemoteLinear, client_for
from oracle import spread
from serving import Served

KEY = "key-that-stays-here"


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.url, api_key=KEY) as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 33), (0, 33)], ids=str)
def test_y_is_the_client_s(client: Client, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (spread(6, 33).flatten()[: torch.Size(shape).numel()].view(shape) / 64).to(dtype)
    y = RemoteLinear(client, "m.ragged")(x)
    assert (y.shape, y.dtype) == ((*shape[:-1], 130), dtype)
    assert torch.equal(y, client.infer("m.ragged", x))


def test_it_knows_its_sizes_from_the_server_or_from_the_caller(client: Client) -> None:
    """Guards: a round trip for each layer of a model whose sizes are known."""
    asked = RemoteLinear(client, "m.ragged")
    assert (asked.in_features, asked.out_features, asked.has_bias) == (33, 130, True)
    told = RemoteLinear("http://127.0.0.1:9", "a", in_features=4, out_features=3, bias=False)
    assert "in_features=4, out_features=3, bias=False, layer='a'" in repr(told)


def test_a_size_that_is_not_the_layer_s_is_refused(client: Client) -> None:
    """Guards: a size that was given and is forgotten."""
    with pytest.raises(InvalidArgument, match=r"in_features is 34 .* has K=33 and N=130"):
        RemoteLinear(client, "m.ragged", in_features=34)
    assert RemoteLinear(client, "m.ragged", in_features=33).out_features == 130


def test_a_wanted_gradient_is_refused(client: Client) -> None:
    """Guards: a training run whose gradients silently end at the remote layer."""
    layer = RemoteLinear(client, "m.plain")
    x = torch.ones(1, 128, requires_grad=True)
    with pytest.raises(InputError, match=r"'m.plain' requires grad") as caught:
        layer(x)
    assert caught.value.code == "grad_unsupported"
    with torch.no_grad():
        assert not layer(x).requires_grad
    with torch.inference_mode():
        assert layer(x).shape == (1, 64)
    assert layer(x.detach()).shape == (1, 64)


def test_it_has_no_state(client: Client) -> None:
    """Guards: a checkpoint with an entry for a weight that is not here."""
    model = nn.Sequential(nn.Linear(128, 128), RemoteLinear(client, "m.plain"))
    assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
    assert list(model[1].parameters()) == []
    model.to(torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_its_weight_is_where_it_says(client: Client, name: str) -> None:
    layer = RemoteLinear(client, "m.plain")
    with pytest.raises(AttributeError, match=f"the {name} of 'm.plain' is on the server"):
        getattr(layer, name)
    assert not hasattr(layer, name)
    with pytest.raises(AttributeError, match="nothing"):
        layer.nothing  # noqa: B018


def test_a_copy_works_and_a_file_of_it_holds_no_key(client: Client) -> None:
    """Guards: sockets, locks or secrets in a copy or a file of a model."""
    layer = RemoteLinear(client, "m.plain")
    x = spread(2, 128)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    file = io.BytesIO()
    torch.save(layer, file)
    assert KEY.encode() not in file.getvalue()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


def test_it_follows_autocast_as_a_linear_does(client: Client) -> None:
    layer = RemoteLinear(client, "m.plain")
    x = spread(2, 128)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == nn.Linear(128, 64)(x).dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
def test_autocast_converts_no_more_than_for_a_linear(client: Client, dtype: torch.dtype) -> None:
    """Guards: integers and float64 that become bfloat16 unasked."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=str(dtype)):
        RemoteLinear(client, "m.plain")(torch.ones(1, 128, dtype=dtype))


def test_a_meta_tensor_has_its_shape_without_the_server() -> None:
    """Guards: a model that cannot be traced for its shapes any more."""
    layer = RemoteLinear("http://127.0.0.1:9", "a", in_features=4, out_features=3)
    y = layer(torch.ones(2, 4, device="meta", dtype=torch.float16))
    assert (y.shape, y.dtype, y.is_meta) == ((2, 3), torch.float16, True)


def test_a_model_of_it_compiles_whole(client: Client) -> None:
    model = nn.Sequential(RemoteLinear(client, "m.plain"), nn.ReLU()).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (1, 5, 9):
        x = spread(m, 128)
        assert torch.equal(compiled(x), model(x)), m


def test_the_client_that_was_given_serves_its_url(client: Client) -> None:
    """Guards: a second client without the key, made for the URL."""
    assert client_for(RemoteLinear(client, "m.plain").url) is client
    assert client_for(client.url + "/") is client, "one address in two spellings"


def test_a_layer_that_is_not_there_is_found_out_at_once(client: Client) -> None:
    with pytest.raises(gemmwire.NotFound):
        RemoteLinear(client, "m.nothing")
