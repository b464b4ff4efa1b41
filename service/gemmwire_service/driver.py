"""The few calls of the CUDA driver that every request takes, by address, in a microsecond each.

torch has them all, at three to six microseconds a call, most of it for tensors that are made to be dropped.
Its calls also let go of the interpreter, and under load wait to have it back; these, which only queue work,
keep it. The one call that waits, `synchronize`, lets go of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_POINTER, _SIZE, _BYTE, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ubyte, ctypes.c_uint

Call = Callable[..., int]


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


class Driver:
    """Addresses, streams, events and graphs are integers, as torch's objects give them.

    The context of the device has to be current on the calling thread, as it is after any call of torch's.
    Errors: DriverError.
    """

    def __init__(self) -> None:
        keeping, releasing = ctypes.PyDLL(LIBRARY), ctypes.CDLL(LIBRARY)
        self._copy = bind(keeping, "cuMemcpyAsync", _POINTER, _POINTER, _SIZE, _POINTER)
        self._zero = bind(keeping, "cuMemsetD8Async", _POINTER, _BYTE, _SIZE, _POINTER)
        self._record = bind(keeping, "cuEventRecord", _POINTER, _POINTER)
        self._wait = bind(keeping, "cuStreamWaitEvent", _POINTER, _POINTER, _FLAGS)
        self._query = bind(keeping, "cuEventQuery", _POINTER)
        self._launch = bind(keeping, "cuGraphLaunch", _POINTER, _POINTER)
        self._synchronize = bind(releasing, "cuEventSynchronize", _POINTER)
        self._library = keeping

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Between any two of device and pinned memory."""
        if code := self._copy(target, source, nbytes, stream):
            raise self._error("cuMemcpyAsync", code)

    def zero(self, target: int, nbytes: int, stream: int) -> None:
        if code := self._zero(target, 0, nbytes, stream):
            raise self._error("cuMemsetD8Async", code)

    def record(self, event: int, stream: int) -> None:
        if code := self._record(event, stream):
            raise self._error("cuEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on comes after what the event recorded."""
        if code := self._wait(stream, event, 0):
            raise self._error("cuStreamWaitEvent", code)

    def launch(self, graph: int, stream: int) -> None:
        """`graph` is an executable one."""
        if code := self._launch(graph, stream):
            raise self._error("cuGraphLaunch", code)

    def passed(self, event: int) -> bool:
        """Whether the device has come to the event."""
        code = self._query(event)
        if code and code != _NOT_READY:
            raise self._error("cuEventQuery", code)
        return not code

    def synchronize(self, event: int) -> None:
        """Return once the device has come to the event."""
        if code := self._synchronize(event):
            raise self._error("cuEventSynchronize", code)

    def _error(self, call: str, code: int) -> DriverError:
        return error_of(self._library, call, code)


@cache
def driver() -> Driver:
    return Driver()


def bind(library: ctypes.CDLL, name: str, *types: type) -> Call:
    function = library[name]
    function.argtypes = types
    function.restype = ctypes.c_int
    call: Call = function
    return call


def error_of(library: ctypes.CDLL, call: str, code: int) -> DriverError:
    """What a call's result means, which is not 0."""
    name = ctypes.c_char_p()
    bind(library, "cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(code, ctypes.byref(name))
    return DriverError(f"{call} failed with {(name.value or b'an unknown error').decode()} ({code})")
