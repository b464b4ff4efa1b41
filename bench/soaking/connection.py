"""A connection that sends bytes as they are, and reads whole answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

LIMIT = 4 << 20
ANSWER_S = 60.0


@dataclass(frozen=True)
class Answer:
    """`json_size`: Inference-Header-Content-Length, or None."""

    status: int
    body: bytes
    json_size: int | None


class Broken(Exception):
    """The server closed, sent what is no answer, or sent nothing for a minute."""


class Connection:
    """One to the server; `opened` counts those that are open now."""

    opened = 0

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._open = True
        Connection.opened += 1

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=LIMIT))

    def close(self, *, reset: bool = False) -> None:
        """Once or more often; `reset`: what has not been read is thrown away."""
        if self._open:
            self._open = False
            Connection.opened -= 1
            self._writer.transport.abort() if reset else self._writer.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def ask(self, data: bytes, seconds: float = ANSWER_S) -> Answer:
        """Send and read. Broken where no whole answer comes."""
        try:
            await asyncio.wait_for(self.send(data), seconds)
            return await self.answer(seconds)
        except (OSError, asyncio.TimeoutError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error

    async def answer(self, seconds: float = ANSWER_S) -> Answer:
        try:
            return await asyncio.wait_for(self._answer(), seconds)
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from error

    async def _answer(self) -> Answer:
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        size = field(head, b"content-length")
        body = await self._reader.readexactly(size) if size else b""
        return Answer(int(head[9:12]), body, field(head, b"inference-header-content-length"))


def field(head: bytes, name: bytes) -> int | None:
    """The number in a header, of a head in lower case."""
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return int(rest.partition(b"\r\n")[0]) if found else None
