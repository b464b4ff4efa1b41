"""A linear layer whose weight is on a server."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gemmwire.client import Client
from gemmwire.errors import InputError, InvalidArgument

from .operator import client_for, remote_linear, use

_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


class RemoteLinear(nn.Module):
    """y [..., out_features] = x [..., in_features] @ W.T + b of `layer` on a server; for inference.

    `server` is a client, which then serves every remote layer of its URL in this process, or a URL. Without
    `in_features` and `out_features` the server is asked for them.

    It stands where an `nn.Linear` stood: y has x's dtype (under autocast that of autocast) and device. It has
    no parameters, so `state_dict()` is empty. A copy or a pickle of it holds the URL and the layer's name, no
    client and no key; where the server asks for one, `use(Client(url, api_key=...))` beforehand.
    Errors: `InvalidArgument` for one of the two that is not the server's; those of `Client.layer`.
    Errors of a forward: those of `Client.infer`; `InputError` where a gradient is wanted.
    """

    def __init__(
        self,
        server: Client | str,
        layer: str,
        *,
        in_features: int | None = None,
        out_features: int | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.url = use(server) if isinstance(server, Client) else client_for(server).url
        self.layer = layer
        if in_features is None or out_features is None:
            info = client_for(self.url).layer(layer)
            if in_features not in (None, info.k) or out_features not in (None, info.n):
                raise InvalidArgument(
                    f"in_features is {in_features} and out_features {out_features}, but layer {layer!r} has "
                    f"K={info.k} and N={info.n}; leave them out"
                )
            in_features, out_features, bias = info.k, info.n, info.bias
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = remote_linear(prepared(x, self.layer), self.url, self.layer, self.out_features)
        return y

    def __getattr__(self, name: str) -> Any:
        """Reached for what is not there."""
        if name in ("weight", "bias"):
            raise AttributeError(
                f"the {name} of {self.layer!r} is on the server at {self.url}; call the module instead"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, "
            f"layer={self.layer!r}, url={self.url!r}"
        )


def prepared(x: Tensor, layer: str) -> Tensor:
    """x as it is sent. Errors: `InputError` where a gradient is wanted, which does not come back."""
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError(
            "grad_unsupported",
            f"x of the remote layer {layer!r} requires grad, and no gradient comes back from a server: call "
            "the model under torch.no_grad() or torch.inference_mode(), or keep this layer local",
        )
    # As autocast does: it converts neither float64 nor integers, nor what has a shape alone.
    if x.dtype in _AUTOCAST and not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
