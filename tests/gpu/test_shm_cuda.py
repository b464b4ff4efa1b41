"""Memory of a GPU that another process owns, with the real driver: two processes."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmwire.wire import Shared, WireError
from gemmwire_service.driver import driver, error_of
from gemmwire_service.shm import Region
from gemmwire_service.shm_cuda import CudaMemory, CudaOpener
from gemmwire_service.shm_driver import DriverDevice
from on_gpu import REHEARSAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REHEARSAL, reason="the rehearsal has no CUDA driver"),
]

NBYTES = 4 << 20
OWNER = Path(__file__).parent.parent / "cuda_owner.py"


class Owner:
    def __init__(self, index: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(OWNER), str(index), str(NBYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.handle = self._answer()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer, "the owner of the memory ended"
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def opener(device: torch.device) -> CudaOpener:
    torch.zeros(1, device=device)  # the context that the server has
    return CudaOpener(DriverDevice(device.index or 0))


@pytest.fixture
def owner(device: torch.device, opener: CudaOpener) -> Iterator[Owner]:
    """Skips where this machine lets no process open another's memory."""
    found = Owner(device.index or 0)
    yield found
    found.end()


def form(handle: str, nbytes: int = NBYTES, index: int = 0) -> dict[str, Any]:
    return {"raw_handle": {"b64": handle}, "device_id": index, "byte_size": nbytes}


def test_what_the_owner_writes_is_read_and_what_is_written_the_owner_sees(
    opener: CudaOpener, owner: Owner
) -> None:
    region = Region("r", opener.open(form(owner.handle)))
    assert owner.ask("put 7") == "done"
    assert bytes(region.read(Shared("r", 1000, 5000))) == bytes([7]) * 5000
    region.write(bytes(range(256)) * 4, 4096)
    got = bytes.fromhex(owner.ask("get"))
    assert got[4096:5120] == bytes(range(256)) * 4
    assert got[:4096] + got[5120:] == bytes([7]) * (NBYTES - 1024)
    assert bytes(region.read(Shared("r", NBYTES - 1, 1))) == b"\7"
    region.close()
    again = opener.open(form(owner.handle))
    again.close()


def test_more_than_was_allocated_is_refused(opener: CudaOpener, owner: Owner) -> None:
    for nbytes in (NBYTES + 1, (1 << 63) - 1):
        with pytest.raises(WireError) as caught:
            opener.open(form(owner.handle, nbytes))
        assert caught.value.code == "region_range"
    opener.open(form(owner.handle)).close()


def test_a_handle_that_is_none_is_refused(opener: CudaOpener, owner: Owner, device: torch.device) -> None:
    for handle in (base64.b64encode(bytes(64)).decode(), base64.b64encode(bytes(range(64))).decode()):
        with pytest.raises(WireError) as caught:
            opener.open(form(handle))
        assert caught.value.code == "region_refused"
    assert torch.ones(4, device=device).sum().item() == 4


def test_the_servers_own_memory_is_refused(opener: CudaOpener, device: torch.device) -> None:
    """Guards: a client that reads, or writes, the weights and the requests of others."""
    import ctypes

    own = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
    library = ctypes.CDLL("libcuda.so.1")
    handle = (ctypes.c_ubyte * 64)()
    code = library.cuIpcGetMemHandle(handle, ctypes.c_uint64(own.data_ptr()))
    if code:
        pytest.skip(f"this memory has no handle: {error_of(library, 'cuIpcGetMemHandle', code)}")
    with pytest.raises(WireError) as caught:
        opener.open(form(base64.b64encode(bytes(handle)).decode()))
    assert caught.value.code == "region_refused"
    assert driver() is not None


def test_an_owner_that_dies_does_not_take_the_device_along(
    opener: CudaOpener, owner: Owner, device: torch.device
) -> None:
    """Guards: a fault of the device, which ends the server, at the first copy of what is gone."""
    memory: CudaMemory = opener.open(form(owner.handle))
    region = Region("r", memory)
    owner.ask("put 3")
    owner.end()
    with suppress_gone():
        assert len(region.read(Shared("r", 0, NBYTES))) == NBYTES
        region.write(bytes(4096), 0)
    region.close()
    assert torch.ones(1024, device=device).sum().item() == 1024


@contextmanager
def suppress_gone() -> Iterator[None]:
    """The memory may be there still, as the driver counts who has it open; no other error may come of it."""
    try:
        yield
    except WireError as error:
        if error.code != "region_gone":
            raise
