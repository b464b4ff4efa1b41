"""A JSON object out of bytes that somebody else wrote."""

from __future__ import annotations

import json
import os
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from gemmwire_service.checkpoint.base import shown
from gemmwire_service.checkpoint.regular_file import open_regular
from gemmwire_service.errors import CheckpointError

SIDECAR_LIMIT = 100_000_000  # bytes of a config.json or a shard index; the largest known are a few MB


def parse_object(raw: bytes, source: object, *, strict: bool) -> dict[str, Any]:
    """The object in `raw` (UTF-8). Raises CheckpointError for anything else.

    `strict` refuses a key given twice and NaN or Infinity. A model's config.json is read without it: real
    ones hold Infinity, and what matters there is looked up by name.
    """
    hooks: dict[str, Any] = {"object_pairs_hook": _unique, "parse_constant": _no_constant} if strict else {}
    try:
        value = json.loads(raw.decode("utf-8"), **hooks)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise CheckpointError(
            f"{source}: not valid JSON: {_sentence(error)}", expected="a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{source}: JSON {type(value).__name__} where an object {{...}} is needed",
            expected="a JSON object",
            got=type(value).__name__,
        )
    return value


def read_object(path: Path, *, strict: bool) -> dict[str, Any]:
    """The JSON object that a file beside the weights holds."""
    with open_regular(path) as file, BufferedReader(file) as buffered:
        try:
            size = os.fstat(file.fileno()).st_size  # a read makes room for all that it is asked for
            raw = buffered.read(min(size, SIDECAR_LIMIT) + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > SIDECAR_LIMIT:
        raise CheckpointError(f"{path}: larger than {SIDECAR_LIMIT} bytes, which no such file is")
    return parse_object(raw, path, strict=strict)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {shown(key)} is given twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _sentence(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:300]
