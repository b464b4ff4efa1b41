"""The CUDA driver's calls for memory of other processes, on the context that torch computes in."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from gemmwire.wire import Buffer

from .driver import LIBRARY, Call, bind, error_of

_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_Pointer, _Host, _Size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class DriverDevice:
    """Calls from any thread; each makes the context its own for as long as it lasts. Errors: DriverError."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._library = ctypes.CDLL(LIBRARY)
        self._context = ctypes.c_void_p()
        self._stream = ctypes.c_void_p()  # of its own: that of all would wait for the others, and they for it
        pointer = ctypes.POINTER
        self._push = self._bind("cuCtxPushCurrent_v2", ctypes.c_void_p)
        self._pop = self._bind("cuCtxPopCurrent_v2", pointer(ctypes.c_void_p))
        self._open = self._bind("cuIpcOpenMemHandle_v2", pointer(_Pointer), _Handle, ctypes.c_uint)
        self._close = self._bind("cuIpcCloseMemHandle", _Pointer)
        self._range = self._bind("cuMemGetAddressRange_v2", pointer(_Pointer), pointer(_Size), _Pointer)
        self._to_host = self._bind("cuMemcpyDtoHAsync_v2", _Host, _Pointer, _Size, ctypes.c_void_p)
        self._to_device = self._bind("cuMemcpyHtoDAsync_v2", _Pointer, _Host, _Size, ctypes.c_void_p)
        self._finish = self._bind("cuStreamSynchronize", ctypes.c_void_p)

    def open(self, handle: bytes) -> int:
        address = _Pointer()
        with self._current():
            self._check(
                "cuIpcOpenMemHandle", self._open(address, _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
            )
        return address.value

    def size(self, address: int) -> int:
        base, size = _Pointer(), _Size()
        with self._current():
            self._check("cuMemGetAddressRange", self._range(base, size, address))
        return base.value + size.value - address

    def read(self, target: memoryview, address: int) -> None:
        if target.nbytes:
            host = ctypes.addressof(ctypes.c_char.from_buffer(target))
            with self._current():
                self._check("cuMemcpyDtoH", self._to_host(host, address, target.nbytes, self._stream))
                self._check("cuStreamSynchronize", self._finish(self._stream))

    def write(self, address: int, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if view.nbytes:
            source = view if not view.readonly else memoryview(bytearray(view))
            host = ctypes.addressof(ctypes.c_char.from_buffer(source))
            with self._current():
                self._check("cuMemcpyHtoD", self._to_device(address, host, view.nbytes, self._stream))
                # Without it a small copy returns before it is made, and the owner may be told too early.
                self._check("cuStreamSynchronize", self._finish(self._stream))

    def close(self, address: int) -> None:
        with self._current():
            self._check("cuIpcCloseMemHandle", self._close(address))

    @contextmanager
    def _current(self) -> Iterator[None]:
        if not self._context:
            self._retain()
        self._check("cuCtxPushCurrent", self._push(self._context))
        try:
            yield
        finally:
            self._pop(ctypes.c_void_p())

    def _retain(self) -> None:
        """The device's primary context, which is torch's."""
        device = ctypes.c_int()
        self._check("cuInit", self._bind("cuInit", ctypes.c_uint)(0))
        get = self._bind("cuDeviceGet", ctypes.POINTER(ctypes.c_int), ctypes.c_int)
        self._check("cuDeviceGet", get(device, self.index))
        retain = self._bind("cuDevicePrimaryCtxRetain", ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
        self._check("cuDevicePrimaryCtxRetain", retain(self._context, device.value))
        self._check("cuCtxPushCurrent", self._push(self._context))
        make = self._bind("cuStreamCreate", ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
        try:
            self._check("cuStreamCreate", make(self._stream, _NON_BLOCKING))
        finally:
            self._pop(ctypes.c_void_p())

    def _bind(self, name: str, *types: type) -> Call:
        return bind(self._library, name, *types)

    def _check(self, call: str, code: int) -> None:
        if code:
            raise error_of(self._library, call, code)
