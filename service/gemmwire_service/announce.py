"""What the server says when it is ready: the layers, what MXFP8 costs each, and a line to paste."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections import Counter
from io import TextIOWrapper

from . import __version__
from .engine import Engine
from .layer import Layer
from .standard_output import discard

log = logging.getLogger("gemmwire")

_SHOWN = 40


def announce(engine: Engine, url: str, seconds: float, by_key: bool = False) -> None:
    """`by_key`: clients have to show one."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a layer's name may have letters that it lacks
    try:
        print("\n".join(lines(list(engine.layers.values()), url, seconds, by_key)), flush=True)
    except OSError as error:  # that nobody reads it is no reason not to serve
        discard()
        log.warning("ready on %s; standard output cannot be written to: %s", url, error.strerror)


def lines(layers: list[Layer], url: str, seconds: float, by_key: bool = False) -> list[str]:
    """The announcement; every layer named here has answered one forward."""
    if not layers:
        return [f"gemmwire {__version__}: no layers yet", f"ready on {url}, to load models ({url}/docs)"]
    width = max(len(layer.name) for layer in layers)
    head = f"  {'layer':<{width}}  {'N':>6}  {'K':>6}  {'backend':<18} error against the unquantized weight"
    shown = layers[:_SHOWN]
    rows = [_row(layer, width) for layer in shown]
    if len(layers) > len(shown):
        rows.append(f"  ... and {len(layers) - len(shown)} more")
    backends = ", ".join(
        f"{count} on {name}" for name, count in Counter(la.backend.name for la in layers).items()
    )
    return [
        f"gemmwire {__version__}: {len(layers)} layers ({backends}), each has answered one forward",
        head,
        *rows,
        f"ready on {url} after {seconds:.1f} s ({url}/docs). In another terminal:",
        "  " + example(layers[0], url, by_key),
    ]


def example(layer: Layer, url: str, by_key: bool = False) -> str:
    """A command that asks this server for one answer, and the user for the key."""
    client = f"gemmwire.Client({_quoted(url)}{', api_key=getpass.getpass()' if by_key else ''})"
    code = (
        f"import {'getpass, ' if by_key else ''}gemmwire, numpy as np; "
        f"print({client}.infer({_quoted(layer.name)}, np.ones((1, {layer.spec.k}), {_quoted('float32')})))"
    )
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}"


def _quoted(text: str) -> str:
    """As a Python string in double quotes: those of the shell around it are single."""
    return json.dumps(text, ensure_ascii=False)


def _row(layer: Layer, width: int) -> str:
    error = layer.error.quantization if layer.error else None
    shown = f"{100 * error:.2f} %" if error is not None else "no unquantized weight to compare with"
    return f"  {layer.name:<{width}}  {layer.spec.n:>6}  {layer.spec.k:>6}  {layer.backend.name:<18} {shown}"
