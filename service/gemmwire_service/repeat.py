"""A small infer request as its connection may send it again, with other numbers: what is then known of it.

A client asks one layer for the same rows of x thousands of times a second. All that differs between two such
requests are the numbers behind the JSON part, and between their answers y and two times.
"""

from __future__ import annotations

from gemmwire import wire

from .backends.base import LayerSpec
from .backlog import Answer
from .call import Call
from .head import Head
from .infer import HEADER_LENGTH, refuse_other_version, request_id
from .response import LONGEST_ID, text_of
from .uvicorn_protocol import reply_lines

_LARGEST = 64 << 10  # bytes of a request and of its y, beyond which what this saves is not to be noticed
_LONGEST = 4 << 10  # bytes of its head and JSON part, which each connection keeps


class Repeat:
    """`head`, then the JSON part of `call`, then other numbers for the layer of `spec`; so many bytes in all.

    It has no layer: a connection that rests would keep one that is unloaded in memory.
    """

    __slots__ = ("_at", "_identity", "_known", "_lines", "_size", "call", "head", "spec")

    def __init__(self, head: Head, spec: LayerSpec, call: Call, known: bytes) -> None:
        self.head = head
        self.spec = spec
        self.call = call.over(b"")
        self._size = len(known) + len(call.x.data)
        self._at = len(known)
        self._known = known
        self._identity = request_id(head.headers)
        self._lines: dict[int, bytes] = {}  # of an answer, by the bytes of its JSON part

    @classmethod
    def of(cls, head: Head, spec: LayerSpec, call: Call, body: memoryview) -> Repeat | None:
        """What was just asked, if its answer is y and nothing else and all behind its JSON part is x."""
        json_part = wire.header_length(head.headers.get(HEADER_LENGTH), head.length)
        if json_part is None:  # all of it is JSON, which may be as long as the x that it holds or names
            return None
        known = len(head.text) + json_part
        answer = call.rows * spec.n * wire.ITEMSIZE[call.datatype]
        small = known <= _LONGEST and max(len(call.x.data), answer) <= _LARGEST
        alike = call.in_place and 0 < len(call.x.data) == head.length - json_part and call.rows > 0
        if not small or not alike or not call.is_plain or not head.keep_alive or len(call.id) > LONGEST_ID:
            return None
        return cls(head, spec, call, head.text + bytes(body[:json_part]))

    def is_in(self, data: memoryview) -> bool:
        """Whether this is the request again, and nothing behind it."""
        return len(data) == self._size and bytes(data[: self._at]) == self._known

    def call_in(self, data: memoryview) -> Call:
        """Of the numbers in `data`, copied out of it."""
        return self.call.over(bytearray(data[self._at :]))

    def message(self, answer: Answer, start: bytes) -> bytes:
        """All of the answer, behind its status line and the fields of every answer; the connection stays.

        Errors: `version_unknown` where the weight was replaced while the call waited.
        """
        refuse_other_version(self.spec.name, self.head.version, answer.version)
        text = wire.aligned(text_of(self.call, self.spec, answer))
        lines = self._lines.get(len(text))
        if lines is None:
            headers, _ = wire.binary_message(text, [])
            size = len(text) + memoryview(answer.data).nbytes
            lines = self._lines[len(text)] = reply_lines(size, self._identity, True, *headers.items())
        return b"".join((start, lines, text, answer.data))
