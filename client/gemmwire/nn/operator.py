"""One call as an opaque operator: a model that holds it compiles with `torch.compile(fullgraph=True)`.

An operator takes tensors, numbers and text, hence names its client by the URL: one is made for each URL and
process, unless `use` has given one.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

from gemmwire.client import Client
from gemmwire.errors import WireError

_clients: dict[str, Client] = {}
_lock = Lock()


def use(client: Client) -> str:
    """Have every `remote_linear` of this process reach the client's server through it; -> its URL."""
    url = client.url
    with _lock:
        _clients[url] = client
    return url


def client_for(url: str) -> Client:
    """The client of this URL, however it is spelled, made on first use. Errors: `InvalidArgument`."""
    with _lock:
        client = _clients.get(url)
        if client is None:
            several = url.split(" ")  # as the `url` of a client of several servers has them
            client = Client(several if len(several) > 1 else url)
            client = _clients.setdefault(client.url, client)
        return client


@torch.library.custom_op("gemmwire::remote_linear", mutates_args=())
def remote_linear(x: Tensor, url: str, layer: str, n: int) -> Tensor:
    """y [..., n] = x [..., K] @ W.T + b of `layer` on the server at `url`, in x's dtype and on its device.

    x: float32, float16 or bfloat16. `n` is the layer's N, which a compiler has to know beforehand. No
    gradient comes back. Errors: those of `Client.infer`; `WireError` where the layer has another N.
    """
    y: Tensor = client_for(url).infer(layer, x.detach())
    if y.shape != _shape(x.shape, n):
        raise WireError(
            "answer_invalid",
            f"Layer {layer!r} has N={y.shape[-1]}, but n={n} was given; pass client.layer({layer!r}).n",
            expected=n,
            got=y.shape[-1],
        )
    return y


@remote_linear.register_fake
def _(x: Tensor, url: str, layer: str, n: int) -> Tensor:
    return x.new_empty(_shape(x.shape, n))


def _shape(x: Sequence[int], n: int) -> tuple[int, ...]:
    return (*x[:-1], n)
