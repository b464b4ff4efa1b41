"""Answers as a client reads them off its connection, in pieces of any size."""

from __future__ import annotations

from fuzz.target import Target
from gemmwire.errors import GemmwireError
from gemmwire.http1 import Reply
from gemmwire.incoming import Incoming


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


OK = b"HTTP/1.1 200 OK\r\n"
SEEDS = {
    "length": b"\xff" + OK + b"Content-Length: 3\r\nx-a: b\r\n\r\nabc",
    "chunked": b"\x05" + OK + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n",
    "informational": b"\x01HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 204 No Content\r\n\r\n",
    "until-the-end": b"\x09HTTP/1.0 200 OK\r\n\r\nabc",
}
WORDS = (b"\r\n", b"HTTP/1.1 ", b"Content-Length: ", b"Transfer-Encoding: chunked", b"Connection: close")
ANSWERS = (Target("answer", answer, SEEDS, words=WORDS),)
