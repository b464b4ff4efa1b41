"""uvicorn's own protocol, for what `connection` does not take: told apart, and with a bound on a head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gemmwire.wire import WireError, buffers_size

from .errors import EngineError
from .infer import error_reply, reply_fields

LONGEST_HEAD = 64 << 10  # bytes of a head, or of what describes a chunked body


def is_for_the_log(record: logging.LogRecord) -> bool:
    """A filter of uvicorn's log: what anybody can have it write, again and again, is counted instead."""
    return record.msg != "Invalid HTTP request received."


class UvicornProtocol(HttpToolsProtocol):
    reject: Callable[[str], None] | None = None  # hears the code of each refusal that no app makes
    began = 0.0  # when the message under way did, on the event loop's clock
    received = 0  # bytes of its body
    _in_message = False
    _has_head = False
    _got_on = False
    _deaf = False  # what else comes has no meaning
    _refusal: bytes | None = None  # of what is no HTTP; it is sent behind the answers to what came before
    _refused: RequestResponseCycle | None = None  # the request in the body of which that was
    _described = 0  # bytes of the head and the trailer so far
    _stuck = 0  # bytes since the parser last came to the end of a head, a piece of a body or a message

    def data_received(self, data: bytes) -> None:
        """The parser joins what it has of a field to each piece that comes, however long that is by then."""
        if self._deaf:
            return
        self._got_on = False
        super().data_received(data)
        if self._deaf:  # by what came; what is owed for it is sent in its turn
            return
        self._stuck = 0 if self._got_on else self._stuck + len(data)
        if self._stuck > LONGEST_HEAD and not self.transport.is_closing():
            if self.between_answers:
                self.transport.write(self._refuse(_too_large()))
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """An offer is declined; but the parser has skipped the body, and takes it for the next request."""
        if any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            self._deaf = True
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP in its turn: uvicorn would answer it in the place of, or amid, another's."""
        self._deaf = True
        answer = self._refuse(_too_large() if self._described > LONGEST_HEAD else _no_http())
        own = self.cycle if self._in_message and self._has_head else None
        waits = bool(self.pipeline) and self.pipeline[0][0] is own
        if (own is None and not self.between_answers) or waits:
            self._refusal, self._refused = answer, own
            return
        if own is None or not own.response_started:
            if own is not None:
                own.disconnected = True  # what the app answers now is dropped
            self.transport.write(answer)
        self.transport.close()

    def _refuse(self, error: WireError) -> bytes:
        if self.reject is not None:
            self.reject(error.code)
        return closing_answer(error)

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        if self._refusal is not None and following is self._refused and not self.transport.is_closing():
            self.transport.write(self._refusal)
            self.transport.close()
        super().on_response_complete()

    def on_message_begin(self) -> None:
        self._in_message = True
        self._has_head = False
        self.began, self.received = self.loop.time(), 0
        self._described = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._describe(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._describe(len(name) + len(value))
        super().on_header(name, value)

    def _describe(self, nbytes: int) -> None:
        """A head that comes in one piece has the bound of one that comes in many."""
        self._described += nbytes
        if self._described > LONGEST_HEAD:
            raise _too_large()  # the parser stops, and uvicorn calls send_400_response

    def on_headers_complete(self) -> None:
        self._got_on = True
        self._has_head = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        self.received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()
        self._in_message = False

    @property
    def between_answers(self) -> bool:
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    @property
    def idle(self) -> bool:
        """Whether it is between two requests."""
        return not self._in_message and self.between_answers

    @property
    def awaits_client(self) -> bool:
        """Whether the rest of a request is to come, and would be read, with no answer before its own."""
        in_turn = self._has_head or self.between_answers
        return self._in_message and in_turn and not self.flow.read_paused

    def give_up(self, error: WireError) -> None:
        """Close on a client that lets its request rest, and say why unless that has an answer already."""
        if self.awaits_client:
            if not self._has_head:
                self.transport.write(closing_answer(error))
            elif not self.cycle.response_started:
                self.cycle.disconnected = True  # what the app answers now is dropped
                self.transport.write(closing_answer(error))
        self.transport.close()

    def take_over(self) -> None:
        """Another answers the connection's next request; this one's timer must not close it."""
        self._unset_keepalive_if_required()


def closing_answer(error: WireError | EngineError) -> bytes:
    """The answer of an error, outside of any request, after which the connection is closed."""
    reply = error_reply(error, {})
    lines = reply_lines(buffers_size(reply.buffers), "", False, *reply.headers.items())
    return b"".join([STATUS_LINE[reply.status], lines, *reply.buffers])


@lru_cache(maxsize=256)
def reply_lines(size: int, identity: str, keep_alive: bool, *headers: tuple[str, str]) -> bytes:
    """The fields of an answer with these headers and a body of `size` bytes, as they are written, and the
    empty line behind them; they are often the same."""
    fields = reply_fields(dict(headers), size, identity)
    if not keep_alive:
        fields["connection"] = "close"
    lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
    return f"{lines}\r\n".encode()


def _no_http() -> WireError:
    return WireError(
        "http_invalid",
        "What was sent is no HTTP/1.1 request that can be read; what came before it has been answered",
        expected="HTTP/1.1",
    )


def _too_large() -> WireError:
    return WireError(
        "head_too_large",
        f"The request's head has more than {LONGEST_HEAD} bytes; send fewer or shorter header fields",
        status=431,
        expected=f"<= {LONGEST_HEAD} bytes",
    )
