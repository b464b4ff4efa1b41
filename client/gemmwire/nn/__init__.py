"""Linear layers of a PyTorch model on a server. Needs torch: `pip install "gemmwire[torch]"`.

>>> from gemmwire.nn import RemoteLinear, replace_linears
>>> replaced = replace_linears(model, client, match="demo")  # each linear that the server holds
>>> print(replaced)                                          # what it replaced, what it left and why
>>> replaced.restore()                                       # the originals again
"""

from __future__ import annotations

from .fused import RemotePart
from .linear import RemoteLinear
from .operator import client_for, remote_linear, use
from .replace import Left, Replaced, replace_linears

__all__ = [
    "Left",
    "RemoteLinear",
    "RemotePart",
    "Replaced",
    "client_for",
    "remote_linear",
    "replace_linears",
    "use",
]
