"""Linear layers of a PyTorch model on a server. Needs torch: `pip install "gemmwire[torch]"`.

>>> from gemmwire.nn import RemoteLinear, replace_linears
>>> replaced = replace_linears(model, client, match="demo")  # each linear that the server holds
>>> print(replaced)                                          # what it replaced, what it left and why
>>> replaced.restore()                                       # the originals again

>>> with capture(model, 256) as captured:                    # rows of x for gemmwire-serve accuracy
...     model(batch)
>>> captured.save("activations.safetensors")
"""

from __future__ import annotations

from .capture import Captured, capture
from .fused import RemotePart
from .linear import RemoteLinear
from .operator import client_for, remote_linear, use
from .replace import Left, Replaced, replace_linears

__all__ = [
    "Captured",
    "Left",
    "RemoteLinear",
    "RemotePart",
    "Replaced",
    "capture",
    "client_for",
    "remote_linear",
    "replace_linears",
    "use",
]
