"""What a client reads: answers off its connection, in pieces, and the files of its command line."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from fuzz.checkpoints import WORDS as CHECKPOINT_WORDS
from fuzz.checkpoints import folder
from fuzz.target import Target
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
FILES = {
    "npy": b"\1" + _npy(np.ones((2, 3), np.float32)),
    "safetensors": b"\0" + container({"x": ("BF16", (2, 3), bytes(12))}),
}
ANSWERS = (
    Target("answer", answer, SEEDS, words=WORDS),
    Target("client_file", client_file, FILES, words=(b"'descr'", b"'<f4'", *CHECKPOINT_WORDS)),
)
