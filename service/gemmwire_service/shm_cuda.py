"""Memory of a GPU that another process has allocated, by CUDA's handle for inter-process memory.

A process cannot open a handle of its own, so that no region is ever memory of the server.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from gemmwire.wire import Buffer, WireError

from .shm import refuse_region

HANDLE_BYTES = 64


class Device(Protocol):
    """The calls of a GPU that take memory of others. Addresses are integers. Errors: DriverError."""

    index: int

    def open(self, handle: bytes) -> int: ...

    def size(self, address: int) -> int:
        """Bytes from the address to the end of its allocation."""
        ...

    def read(self, target: memoryview, address: int) -> None: ...

    def write(self, address: int, data: Buffer) -> None: ...

    def close(self, address: int) -> None: ...


class CudaMemory:
    kind: ClassVar[str] = "cuda"

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self._device = device
        self._address = address
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read(self, target: memoryview, offset: int) -> None:
        with _Gone():
            self._device.read(target, self._address + offset)

    def lend(self, offset: int, nbytes: int) -> None:
        """The host reads x, and has to have a copy for that."""

    def write(self, data: Buffer, offset: int) -> None:
        with _Gone():
            self._device.write(self._address + offset, data)

    def facts(self) -> dict[str, Any]:
        return {"device_id": self._device.index}

    def abandoned(self) -> bool:
        """Nothing says so: it is kept until it is unregistered."""
        return False

    def close(self) -> None:
        self._device.close(self._address)


class CudaOpener:
    kind: ClassVar[str] = "cuda"

    def __init__(self, device: Device) -> None:
        self._device = device

    def open(self, form: Mapping[str, Any]) -> CudaMemory:
        """Errors: WireError `region_refused`, `region_range`."""
        from .driver import DriverError

        index, nbytes = form["device_id"], form["byte_size"]
        if index != self._device.index:
            refuse_region(
                f"device_id is {index}, but the server computes on device {self._device.index}",
                self._device.index,
                index,
            )
        try:
            address = self._device.open(_handle(form["raw_handle"]["b64"]))
        except DriverError as error:
            refuse_region(
                f"raw_handle cannot be opened: {error}; it must be that of another process's memory"
            )
        size = self._device.size(address)
        if nbytes > size:
            self._device.close(address)
            raise WireError(
                "region_range",
                f"byte_size is {nbytes}, but the memory of raw_handle has {size} bytes",
                expected=f"<= {size}",
                got=nbytes,
            )
        return CudaMemory(self._device, address, nbytes)


class _Gone:
    """A copy that the device refuses is the request's failure."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from .driver import DriverError

        if isinstance(error, DriverError):
            raise WireError("region_gone", f"The region's memory cannot be used any more: {error}") from error


def _handle(text: str) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        refuse_region(
            f"raw_handle.b64 has {len(handle)} bytes; it must be a cudaIpcMemHandle_t in base64, of "
            f"{HANDLE_BYTES} bytes",
            HANDLE_BYTES,
            len(handle),
        )
    return handle
