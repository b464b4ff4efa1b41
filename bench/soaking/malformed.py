"""Requests that a client gets wrong, or means to: what is sent, and how it has to be answered."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from soaking.connection import Broken, Connection
from soaking.exact import MODEL, post, with_body

LAYER, K = f"{MODEL}.square", 1024
STALL_S = 5  # of the server
LEFT_S = 0.05  # until a client that leaves is gone


@dataclass(frozen=True)
class Malformed:
    """`statuses`: of the answer; none: the client leaves without one, after `sent`."""

    name: str
    sent: bytes = field(repr=False)
    statuses: tuple[int, ...] = (400,)


def tensor(**changed: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, K], "datatype": "BF16", "data": [1.0] * K} | changed


def document(*inputs: dict[str, Any], **extra: Any) -> bytes:
    return json.dumps({"inputs": list(inputs)} | extra).encode()


def weights(body: bytes, layer: str = LAYER) -> bytes:
    return with_body([f"PUT /v2/repository/models/{layer}/weights HTTP/1.1", "Host: soak"], body)


def safetensors(shape: list[int]) -> bytes:
    """A weight of zeros in BF16."""
    size = 2 * shape[0] * shape[1]
    head = json.dumps({"weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size)


ROW = bytes(2 * K)
BINARY = document(tensor(data=None) | {"parameters": {"binary_data_size": len(ROW)}})
WHOLE = post(LAYER, ROW * 16, 0)
CHUNKED = (
    f"POST /v2/models/{LAYER}/infer HTTP/1.1\r\nHost: soak\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
)

JSON = (
    Malformed("text instead of JSON", post(LAYER, b"not json")),
    Malformed("no body", post(LAYER, b"")),
    Malformed("JSON that ends early", post(LAYER, document(tensor())[:-2])),
    Malformed("JSON 20000 deep", post(LAYER, b"[" * 20_000)),
    Malformed("a key twice", post(LAYER, b'{"inputs": [], "inputs": []}')),
    Malformed("a bare NaN", post(LAYER, document(tensor()).replace(b"1.0", b"NaN", 1))),
    Malformed("text for a number", post(LAYER, document(tensor(data=["one"] * K)))),
    Malformed("a number beyond FP32", post(LAYER, document(tensor(data=[1e39] * K)))),
)
TENSORS = (
    Malformed("another K", post(LAYER, document(tensor(shape=[1, K - 1], data=[1.0] * (K - 1))))),
    Malformed("fewer numbers than the shape", post(LAYER, document(tensor(data=[1.0] * (K - 1))))),
    Malformed("a negative shape", post(LAYER, document(tensor(shape=[-1, K])))),
    Malformed("a shape of 2^62 rows", post(LAYER, document(tensor(shape=[1 << 62, K])))),
    Malformed("a datatype that is none", post(LAYER, document(tensor(datatype="FP8")))),
    Malformed("an output that is none", post(LAYER, document(tensor(), outputs=[{"name": "z"}]))),
    Malformed("an input twice", post(LAYER, document(tensor(), tensor()))),
    Malformed("a tensor a byte short", post(LAYER, BINARY + ROW[:-1], len(BINARY))),
    Malformed("a tensor a byte long", post(LAYER, BINARY + ROW + b"\0", len(BINARY))),
    Malformed("a header length beyond the body", post(LAYER, ROW, len(ROW) + 1)),
    Malformed("rows that are not whole", post(LAYER, ROW[:-1], 0)),
)
HTTP = (
    Malformed("a layer that is not there", post("steady.nowhere", ROW, 0), (404,)),
    Malformed("a route that is not there", b"GET /v3 HTTP/1.1\r\nHost: soak\r\n\r\n", (404,)),
    Malformed("another method", f"GET /v2/models/{LAYER}/infer HTTP/1.1\r\nHost: x\r\n\r\n".encode(), (405,)),
    Malformed("an encoding that is none", post(LAYER, ROW, 0, "Content-Encoding: br"), (415,)),
    Malformed("gzip that is damaged", post(LAYER, gzip.compress(ROW)[:-9], 0, "Content-Encoding: gzip")),
    Malformed("a body of 1 GiB", post(LAYER, b"").replace(b"h: 0\r", b"h: 1073741824\r"), (413,)),
    Malformed("a length that is no number", post(LAYER, b"").replace(b"h: 0\r", b"h: many\r")),
    Malformed("a head of 100 KiB", post(LAYER, b"", None, "X-Long: " + "a" * 100_000), (431,)),
    Malformed("garbage", bytes(range(256)) * 8),
    Malformed("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(506)),
    Malformed("a chunk of no size", CHUNKED + b"zz\r\n\r\n"),
)
REFITS = (
    Malformed("a weight that is no safetensors", weights(b"\xff" * 4096)),
    Malformed("a weight of another shape", weights(safetensors([8, K]))),
    Malformed("a weight that ends early", weights(safetensors([1024, K])[:-1])),
    Malformed("a weight of no layer", weights(safetensors([8, 32]), "steady.nowhere"), (404,)),
)
WAITING = (
    Malformed("half a head, then nothing", WHOLE[:30], (408,)),
    Malformed("half a body, then nothing", WHOLE[: len(WHOLE) // 2], (408,)),
)
LEAVING = (
    Malformed("half a head, then gone", WHOLE[:30], ()),
    Malformed("half a body, then gone", WHOLE[: len(WHOLE) // 2], ()),
    Malformed("half a weight, then gone", weights(safetensors([1024, K]))[: 1 << 20], ()),
    Malformed("half a chunked body, then gone", CHUNKED + b"800\r\n" + ROW[:100], ()),
    Malformed("a whole request, then gone", WHOLE, ()),
    Malformed("nothing, then gone", b"", ()),
)
KINDS = (*JSON, *TENSORS, *HTTP, *REFITS, *WAITING, *LEAVING)


async def mistreat(port: int, kind: Malformed, told: Callable[[str], None]) -> None:
    """Send it on a connection of its own, and tell what is wrong with the answer."""
    try:
        connection = await Connection.open(port)
    except OSError as error:
        told(f"{kind.name}: no connection, {error}")
        return
    try:
        if kind.statuses:
            answer = await connection.ask(kind.sent)
            if answer.status not in kind.statuses:
                told(f"{kind.name}: answered {answer.status}, not {kind.statuses[0]}: {answer.body[:200]!r}")
        else:
            await connection.send(kind.sent)
            await asyncio.sleep(LEFT_S)
    except (Broken, OSError) as error:
        told(f"{kind.name}: {error}")
    finally:
        connection.close(reset=not kind.statuses)
