"""The command `gemmwire`: a server seen from a terminal or a script."""

from __future__ import annotations

from .command import main

__all__ = ["main"]
