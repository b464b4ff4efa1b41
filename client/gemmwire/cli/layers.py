"""`gemmwire layers URL`."""

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

from gemmwire.client import Client

from .result import Result, table

_FACTS = ("name", "n", "k", "bias", "version", "state", "backend", "reason")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", default="*", help="of the names, as 'demo.*.W1' (all)")


def run(client: Client, options: argparse.Namespace) -> Result:
    found = [layer for layer in client.layers() if fnmatchcase(layer.name, options.pattern)]
    document = [{fact: getattr(layer, fact) for fact in _FACTS} for layer in found]
    heads = ("layer", "N", "K", "bias", "version", "state", "backend")
    rows = [[entry[fact] for fact in _FACTS[:7]] for entry in document]
    return Result(document, table(heads, rows))
