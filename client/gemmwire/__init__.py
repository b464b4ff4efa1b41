"""Client of a gemmwire server: y = x @ W.T + b for an MXFP8 weight that lives on the server.

>>> import gemmwire
>>> client = gemmwire.Client("http://127.0.0.1:8000")
>>> y = client.infer("demo.layers.0.attn.wq", x)  # a NumPy array or torch tensor [..., K] -> [..., N]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_client import AsyncClient
    from .client import Client
    from .errors import (
        BadRequest,
        Conflict,
        ConnectionFailed,
        DeadlineExceeded,
        Forbidden,
        GatewayFailed,
        GemmwireError,
        InputError,
        InvalidArgument,
        NotFound,
        OutOfStep,
        Overloaded,
        RefitIncomplete,
        ServerError,
        ServerFailed,
        TimedOut,
        TooLarge,
        TransportError,
        Unauthorized,
        Unsupported,
        WireError,
    )
    from .facts import Answer, LayerInfo, Refitted, ServerInfo
    from .retries import Retries
    from .tls import TLS

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "Answer",
    "AsyncClient",
    "BadRequest",
    "Client",
    "Conflict",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Forbidden",
    "GatewayFailed",
    "GemmwireError",
    "InputError",
    "InvalidArgument",
    "LayerInfo",
    "NotFound",
    "OutOfStep",
    "Overloaded",
    "RefitIncomplete",
    "Refitted",
    "Retries",
    "ServerError",
    "ServerFailed",
    "ServerInfo",
    "TimedOut",
    "TooLarge",
    "TransportError",
    "Unauthorized",
    "Unsupported",
    "WireError",
    "__version__",
]

_HOMES = {
    "AsyncClient": "async_client",
    "Client": "client",
    "Answer": "facts",
    "LayerInfo": "facts",
    "Refitted": "facts",
    "Retries": "retries",
    "ServerInfo": "facts",
    "TLS": "tls",
}


if not TYPE_CHECKING:  # a type checker would take it for the promise of every name

    def __getattr__(name: str) -> object:
        # Imported on first use, so that `import gemmwire.wire` costs a server nothing of the client.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
