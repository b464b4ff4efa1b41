"""What a client reads: answers off its connection, in pieces, and the files of its command line."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.checkpoints import WORDS as CHECKPOINT_WORDS
from fuzz.checkpoints import folder
from fuzz.target import Target, quoted
from gemmwire import replies, wire
from gemmwire.arrays import framework_of
from gemmwire.cli import files
from gemmwire.errors import GemmwireError
from gemmwire.http1 import Reply
from gemmwire.incoming import Incoming
from safetensors_bytes import container


def answer(data: bytes) -> None:
    """The first byte is the size of the pieces that arrive; the rest is what a server sends."""
    step = max(1, data[0]) if data else 1
    incoming = Incoming()
    receiving = incoming.reply()
    at = 1
    try:
        memory = next(receiving)
        while True:
            piece = data[at : at + min(step, len(memory))]
            memory[: len(piece)] = piece
            at += len(piece)
            memory = receiving.send(len(piece))
    except StopIteration as done:
        _check(done.value)
    except (GemmwireError, ConnectionError):
        return


def _check(reply: Reply) -> None:
    assert 200 <= reply.status < 1000


X = np.ones((1, 3), np.float32)
SENT = replies.Sent(framework_of(X), X, (1, 3), "FP32", "")
READERS: tuple[Callable[[Reply], object], ...] = (
    replies.read_layers,
    replies.read_layer,
    replies.read_refitted,
    replies.read_server,
    replies.read_stats,
    replies.read_health,
    replies.read_nothing,
    lambda reply: replies.read_answer(reply, SENT),
)
STATUSES = (200, 204, 301, 400, 404, 409, 429, 500, 502, 503, 504, 599)


def reply(data: bytes) -> None:
    """Two bytes choose what is read and the status; then Retry-After, the header's length, and the body."""
    first, second = [*data[:2], 0, 0][:2]
    read, status = READERS[first % len(READERS)], STATUSES[second % len(STATUSES)]
    retry, length, body = [*data[2:].split(b"\n", 2), b"", b""][:3]
    named = {"retry-after": retry, wire.HEADER_LENGTH.lower(): length}
    headers = {name: value.decode("latin-1") for name, value in named.items() if value}
    try:
        read(Reply(status, headers, bytearray(body)))
    except GemmwireError as error:
        str(error).encode("utf-8", "backslashreplace")


def client_file(data: bytes) -> None:
    """The first byte chooses the kind; the rest is the file."""
    path = folder() / ("x.npy" if data[:1] and data[0] & 1 else "x.safetensors")
    path.write_bytes(data[1:])
    try:
        array = files.read(path, None)
    except GemmwireError as error:
        str(error).encode("utf-8", "backslashreplace")
        return
    assert array.nbytes <= len(data)
    array.sum() if array.dtype.kind in "fiu" else array.tobytes()


def _npy(array: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


OK = b"HTTP/1.1 200 OK\r\n"
SEEDS = {
    "length": b"\xff" + OK + b"Content-Length: 3\r\nx-a: b\r\n\r\nabc",
    "chunked": b"\x05" + OK + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n",
    "informational": b"\x01HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 204 No Content\r\n\r\n",
    "until-the-end": b"\x09HTTP/1.0 200 OK\r\n\r\nabc",
}
WORDS = (b"\r\n", b"HTTP/1.1 ", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Connection: close")
ANSWER = b'{"model_name":"l","model_version":"1","outputs":[{"name":"y","shape":[1,2],"datatype":"FP32",'
ANSWER += b'"parameters":{"binary_data_size":8}}]}'
REPLIES = {
    "index": b'\0\0\n\n[{"name":"a","n":1,"k":2,"version":"1"},{"name":"m","layers":1}]',
    "config": b'\1\0\n\n{"name":"a","n":1,"k":2,"version":"1","bias":false,"quantization_error":0.1}',
    "refitted": b'\2\0\n\n{"name":"a","version":"2","previous_version":"1","arithmetic_error":1}',
    "server": b'\3\0\n\n{"name":"gemmwire","version":"1","extensions":["statistics"]}',
    "statistics": b'\4\0\n\n{"model_stats":[{}]}',
    "answer": b"\7\0\n" + str(len(ANSWER)).encode() + b"\n" + ANSWER + bytes(8),
    "problem": b"\1\x09"
    + b'3\n\n{"error":"full","code":"queue_full","expected":1,"got":null,"request_id":"r"}',
}
FILES = {
    "npy": b"\1" + _npy(np.ones((2, 3), np.float32)),
    "safetensors": b"\0" + container({"x": ("BF16", (2, 3), bytes(12))}),
}
ANSWERS = (
    Target("answer", answer, SEEDS, words=WORDS),
    Target(
        "reply",
        reply,
        REPLIES,
        words=quoted("error", "code", "state", "config", "layers", "bucket", "backend"),
    ),
    Target("client_file", client_file, FILES, words=(b"'descr'", b"'<f4'", *CHECKPOINT_WORDS)),
)
