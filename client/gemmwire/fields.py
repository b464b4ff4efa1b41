"""Checked fields of the JSON part of a message.

Each function returns a value of the promised type or refuses. A refusal is a `WireError` that says what was
given and what is needed. What a sender wrote is quoted in part only, so that a message of megabytes cannot
make an error of megabytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from typing import Any, NoReturn

from .errors import WireError
from .messages import ITEMSIZE, Parameters, Shared

_QUOTED = 80
_SHARED = "shared_memory_"
_REGION, _BYTE_SIZE, _OFFSET = _SHARED + "region", _SHARED + "byte_size", _SHARED + "offset"


def json_object(part: memoryview, limit: int) -> dict[str, Any]:
    """The JSON part -> its top object. Errors: `json_too_large` (413), `json_invalid`."""
    if len(part) > limit:
        raise WireError(
            "json_too_large",
            f"The JSON part has {len(part)} bytes, the limit is {limit}; send the tensor as binary "
            "(Inference-Header-Content-Length), which is also many times faster",
            status=413,
            expected=f"<= {limit}",
            got=len(part),
        )
    head = _parse(part)
    if not isinstance(head, dict):
        raise WireError(
            "json_invalid",
            f"The JSON part is {kind(head)}; it must be an object with 'inputs' or 'outputs'",
            expected="object",
            got=kind(head),
        )
    return head


def _parse(part: memoryview) -> Any:
    try:
        text = str(part, "utf-8")
        value = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:  # surrogates: a lone one is no text, and cannot be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}"
    except UnicodeEncodeError:
        reason = "a string holds half of a surrogate pair"
    except json.JSONDecodeError as error:
        reason = str(error)
    except ValueError:
        reason = "it holds a number with too many digits"
    except RecursionError:
        reason = "it is nested too deeply"
    else:
        return value
    raise WireError("json_invalid", f"The JSON part cannot be read: {reason}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise WireError(
            "json_invalid", f"The JSON key {twice[:_QUOTED]!r} appears twice in one object; send it once"
        )
    return result


def _no_constant(text: str) -> NoReturn:
    raise WireError(
        "json_invalid",
        f'{text} is not JSON; write non-finite numbers as the strings "NaN", "Infinity" and "-Infinity", '
        "or send binary",
        expected=f'"{text}"',
        got=text,
    )


# json.loads makes a decoder anew for every call that passes a hook.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def entries(head: Mapping[str, Any], key: str, limit: int) -> list[Any]:
    """The array of named tensors under `key`: at most `limit` entries, no name twice."""
    value = head.get(key)
    if not isinstance(value, list):
        invalid(f"'{key}' is {kind(value)}; it must be an array of tensors", "array", kind(value))
    if len(value) > limit:
        invalid(f"'{key}' has {len(value)} entries; at most {limit} are taken", limit, len(value))
    if len(value) > 1:
        names = [item.get("name") for item in value if isinstance(item, dict)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            name = quote(twice[0])
            invalid(f"'{key}' has the name {name} twice; names must differ", "distinct names", name)
    return value


def text(item: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = item.get(key, default)
    if not isinstance(value, str):
        invalid(f"'{key}' of {where} is {kind(value)}; it must be a string", "string", kind(value))
    return value


def parameters(item: Mapping[str, Any], where: str) -> dict[str, bool | int | float | str]:
    value = item.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        invalid(f"'parameters' of {where} is {kind(value)}; it must be an object", "object", kind(value))
    for key, entry in value.items():
        if not isinstance(entry, (bool, int, float, str)) or (type(entry) is float and not isfinite(entry)):
            given = "beyond the range of a number" if isinstance(entry, float) else kind(entry)
            invalid(
                f"Parameter {key[:_QUOTED]!r} of {where} is {given}; it must be a boolean, number or string",
                "boolean, number or string",
                given,
            )
    return value


def flag(parameters: Parameters, key: str, where: str) -> bool | None:
    value = parameters.get(key)
    if value is not None and not isinstance(value, bool):
        invalid(
            f"Parameter '{key}' of {where} is {kind(value)}; it must be true or false", "boolean", kind(value)
        )
    return value


def shared(parameters: Parameters, where: str) -> Shared | None:
    """The region that the parameters of a tensor name, None where they name none."""
    given = [key for key in parameters if key.startswith(_SHARED)]
    if not given:
        return None
    for key in given:
        if key not in (_REGION, _BYTE_SIZE, _OFFSET):
            invalid(f"{where} has parameter {key[:_QUOTED]!r}, which there is not", [_REGION], key[:_QUOTED])
    name = parameters.get(_REGION)
    if not isinstance(name, str) or not name:
        invalid(
            f"Parameter '{_REGION}' of {where} is {kind(name)}; it must be the name of a region that was "
            "registered",
            "string",
            kind(name),
        )
    for key in ("binary_data_size", "binary_data"):
        if parameters.get(key):
            frame(f"{where} has both {_REGION} and {key}; send one of them")
    return Shared(
        name,
        size(parameters.get(_OFFSET, 0), f"Parameter '{_OFFSET}' of {where}"),
        size(parameters.get(_BYTE_SIZE), f"Parameter '{_BYTE_SIZE}' of {where}"),
    )


def size(value: object, what: str, least: int = 0) -> int:
    """A number of bytes, which no sum of two can take beyond 64 bits unnoticed."""
    if type(value) is not int or not least <= value < 1 << 63:
        given = quote(value)
        invalid(f"{what} is {given}; it must be a whole number from {least} to 2^63 - 1", "bytes", given)
    return value


def datatype(item: Mapping[str, Any], where: str) -> str:
    value = text(item, "datatype", where)
    if value not in ITEMSIZE:
        raise WireError(
            "dtype_unsupported",
            sentence(f"{where} has datatype {value[:_QUOTED]!r}; the datatypes are {', '.join(ITEMSIZE)}"),
            expected=list(ITEMSIZE),
            got=value[:_QUOTED],
        )
    return value


def shape(item: Mapping[str, Any], where: str, max_rank: int) -> tuple[int, ...]:
    value = item.get("shape")
    if not isinstance(value, list):
        _shape_invalid(f"The shape of {where} is {quote(value)}; it must be an array of whole numbers", value)
    if len(value) > max_rank:
        _shape_invalid(
            f"The shape of {where} has {len(value)} dimensions; at most {max_rank} are taken", value
        )
    for size in value:
        if type(size) is not int:
            _shape_invalid(
                f"The shape of {where} is {quote(value)}; it must be an array of whole numbers", value
            )
        if not 0 <= size < 1 << 63:
            _shape_invalid(
                f"The shape of {where} is {quote(value)}; each size must be at least 0 and below 2^63", value
            )
    return tuple(value)


_KINDS: dict[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "missing or null",
}


def kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def quote(value: object) -> str:
    """`value` as JSON, cut to a length that fits into a sentence."""
    written = json.dumps(value, default=str)
    return written if len(written) <= _QUOTED else written[: _QUOTED - 3] + "..."


def sentence(message: str) -> str:
    return message[:1].upper() + message[1:]


def frame(message: str, *, expected: object = None, got: object = None) -> NoReturn:
    raise WireError("frame_invalid", sentence(message), expected=expected, got=got)


def invalid(message: str, expected: object, got: object) -> NoReturn:
    raise WireError("request_invalid", sentence(message), expected=expected, got=got)


def _shape_invalid(message: str, value: object) -> NoReturn:
    raise WireError("shape_invalid", message, got=quote(value))
