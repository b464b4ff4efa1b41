"""Whether an answer is the one of the version that it names, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from soaking.connection import Answer
from soaking.exact import Request

NUMPY = {"BF16": ml_dtypes.bfloat16, "FP32": np.float32}
Versions = Mapping[int, int]
"""Of one layer: which weight a version is."""


def wrong(request: Request, answer: Answer, versions: Versions, least: int = 1) -> str:
    """A sentence, or nothing where the answer is right. `answer` has the status 200.

    `least`: the version that was served when the request was sent.
    """
    try:
        head = json.loads(answer.body[: answer.json_size])
        version, y = int(head["model_version"]), data(request, answer, head)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"{request.layer}, {request.form}: no answer to read, {error}"
    if version not in versions:
        return f"{request.layer}, {request.form}: it names version {version}, which nobody has sent"
    if version < least:
        return f"{request.layer}, {request.form}: version {version}, asked when {least} was served"
    return difference(request, version, y, request.expected[versions[version]])


def data(request: Request, answer: Answer, head: Any) -> bytes:
    if answer.json_size is not None:
        return answer.body[answer.json_size :]
    numbers = head["outputs"][0]["data"]
    return np.asarray(numbers, np.float64).astype(NUMPY[request.datatype]).tobytes()


def difference(request: Request, version: int, y: bytes, expected: bytes) -> str:
    if y == expected:
        return ""
    what = f"{request.layer}, {request.form}, {request.rows} rows, version {version}"
    if len(y) != len(expected):
        return f"{what}: {len(y)} bytes, not {len(expected)}"
    place = next(index for index, (got, right) in enumerate(zip(y, expected, strict=True)) if got != right)
    others = [index for index, each in enumerate(request.expected) if each == y]
    hint = f"; it is the answer of weight {others[0]}" if others else ""
    return f"{what}: byte {place} of {len(y)} is {y[place]:#04x}, not {expected[place]:#04x}{hint}"
