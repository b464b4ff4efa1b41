"""A server of real sockets that does exactly what a test's script says, good or bad, to each connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Received:
    """A request as it came: `headers` with lower-case names."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Session:
    """One connection, from the server's side."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._left = b""

    def head(self) -> bytes | None:
        """Read a request's head and nothing of its body; None when the client has gone."""
        while b"\r\n\r\n" not in self._left:
            more = self.sock.recv(1 << 16)
            if not more:
                return None
            self._left += more
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        return head

    def request(self) -> Received | None:
        """Read a whole request; None when the client has gone."""
        head = self.head()
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, _ = first.split(" ")
        return Received(method, path, headers, self._body(int(headers.get("content-length", "0"))))

    def _body(self, size: int) -> bytes:
        parts, got = [self._left], len(self._left)
        while got < size:
            parts.append(self.sock.recv(1 << 20))
            if not parts[-1]:
                raise ConnectionError(f"{got} of {size} bytes came")
            got += len(parts[-1])
        body = b"".join(parts)
        self._left = body[size:]
        return body[:size]

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.sock.sendall(part)


@dataclass
class Served:
    """A running server: its address, and what has come."""

    url: str
    port: int
    connections: int = 0
    requests: list[Received] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)


Script = Callable[[Session, Served], None]


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """A whole HTTP answer. `content_length="7"` puts another length in than the body has."""
    fields = {"content-length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def replying(*replies: bytes) -> Script:
    """Each request, on whatever connection, gets the next reply; the last one is repeated."""

    def script(session: Session, served: Served) -> None:
        while (request := session.request()) is not None:
            served.requests.append(request)
            session.send(replies[min(len(served.requests), len(replies)) - 1])

    return script


def waiting(came: threading.Event, go_on: threading.Event, reply: bytes) -> Script:
    """Each request is told of by `came`, and gets the reply once it may."""

    def script(session: Session, served: Served) -> None:
        while session.request() is not None:
            came.set()
            go_on.wait(20)
            session.send(reply)

    return script


@contextmanager
def serve(script: Script) -> Iterator[Served]:
    """Run `script` for each connection, in a thread, until the block ends; its failure fails the test."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    served = Served(f"http://127.0.0.1:{port}", port)
    open_sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def one(sock: socket.socket) -> None:
        with sock, suppress(ConnectionError):
            try:
                script(Session(sock), served)
            except ConnectionError:
                raise
            except BaseException as error:
                served.errors.append(error)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            served.connections += 1
            open_sockets.append(sock)
            threads.append(threading.Thread(target=one, args=(sock,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield served
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for sock in open_sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)
    assert served.errors == []
