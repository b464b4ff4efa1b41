"""CUDA shared memory over HTTP, with a GPU that is pretended: tests/gpu has the real one."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from gemmwire.wire import Buffer
from gemmwire_service import shm_openers
from gemmwire_service.driver import DriverError
from gemmwire_service.errors import SettingsError
from gemmwire_service.settings import Settings
from http_calls import infer, message, raw
from oracle import spread
from serving import Served, serving, settings

X = spread(3, 128, seed=1)
HANDLE = b"H" * 64


class FakeDevice:
    """Memory of "another process" behind HANDLE; `lost`: the device refuses copies of it."""

    index = 0

    def __init__(self) -> None:
        self.bytes = bytearray(8192)
        self.opened: list[int] = []
        self.lost = False

    def open(self, handle: bytes) -> int:
        if handle != HANDLE:
            raise DriverError("cuIpcOpenMemHandle failed with CUDA_ERROR_INVALID_VALUE (1)")
        self.opened.append(1 << 40)
        return 1 << 40

    def size(self, address: int) -> int:
        return len(self.bytes) - (address - (1 << 40))

    def read(self, target: memoryview, address: int) -> None:
        self._refuse_lost()
        target[:] = self.bytes[address - (1 << 40) :][: len(target)]

    def write(self, address: int, data: Buffer) -> None:
        self._refuse_lost()
        at = address - (1 << 40)
        self.bytes[at : at + len(data)] = data

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def _refuse_lost(self) -> None:
        if self.lost:
            raise DriverError("cuMemcpy failed with CUDA_ERROR_INVALID_VALUE (1)")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(shm_openers, "_device", lambda name: device)
    return device


@pytest.fixture(params=(True, False), ids=("fast-path", "asgi"))
def served(gpu: FakeDevice, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(settings(model=(f"m={checkpoint}",), cuda_shm=True, fast_path=request.param)) as running:
        yield running
    assert gpu.opened == []  # also of what nobody unregistered


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as connected:
        yield connected


def register(client: Any, name: str = "r", **fields: Any) -> None:
    form = {"raw_handle": base64.b64encode(HANDLE).decode(), "device_id": 0, "byte_size": 8192} | fields
    client.register_cuda_shared_memory(name, **form)


def test_tritonclient_sends_and_receives_in_memory_of_the_gpu(
    client: Any, served: Served, gpu: FakeDevice
) -> None:
    assert "cuda_shared_memory" in client.get_server_metadata()["extensions"]
    register(client)
    assert client.get_cuda_shared_memory_status() == [{"name": "r", "device_id": 0, "byte_size": 8192}]
    assert client.get_system_shared_memory_status() == []
    x = triton.InferInput("x", [3, 128], "FP32")
    x.set_shared_memory("r", 1536, offset=64)
    y = triton.InferRequestedOutput("y")
    y.set_shared_memory("r", 768, offset=4096)
    expected = raw(infer(served, "m.plain", *message(X)).tensor)
    gpu.bytes[64:1600] = X.numpy().tobytes()
    for _ in range(2):
        gpu.bytes[4096:4864] = bytes(768)
        client.infer("m.plain", [x], outputs=[y])
        assert gpu.bytes[4096:4864] == expected
    client.unregister_cuda_shared_memory("r")
    assert gpu.opened == []
    with pytest.raises(InferenceServerException, match="not registered"):
        client.infer("m.plain", [x], outputs=[y])


REFUSED = {
    "no-base64": ({"raw_handle": "!"}, "64 bytes"),
    "short": ({"raw_handle": base64.b64encode(b"H" * 63).decode()}, "64 bytes"),
    "other": ({"raw_handle": base64.b64encode(bytes(64)).decode()}, "another process's memory"),
    "other-device": ({"device_id": 1}, "computes on device 0"),
    "negative-device": ({"device_id": -1}, "computes on device 0"),
    "too-large": ({"byte_size": 8193}, "has 8192 bytes"),
    "huge": ({"byte_size": (1 << 63) - 1}, "has 8192 bytes"),
    "beyond-64-bits": ({"byte_size": 1 << 64}, "byte_size"),
    "negative": ({"byte_size": -1}, "byte_size"),
    "float": ({"byte_size": 64.0}, "byte_size"),
}


@pytest.mark.parametrize(("fields", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_memory_of_another_is_refused(
    client: Any, gpu: FakeDevice, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InferenceServerException, match=words) as raised:
        register(client, **fields)
    assert raised.value.status() == "400"
    assert gpu.opened == []
    register(client)
    assert len(gpu.opened) == 1


def test_a_name_means_one_region_of_either_kind(client: Any) -> None:
    register(client)
    with pytest.raises(InferenceServerException, match="already"):
        register(client)
    client.unregister_system_shared_memory("r")  # of the other kind: not this one
    assert len(client.get_cuda_shared_memory_status()) == 1
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []


def test_memory_that_the_gpu_refuses_costs_its_own_request(
    client: Any, served: Served, gpu: FakeDevice
) -> None:
    register(client)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 1536}
    x = {"name": "x", "shape": [3, 128], "datatype": "FP32", "parameters": place}
    body = json.dumps({"inputs": [x]}).encode()
    gpu.lost = True
    reply = infer(served, "m.plain", body)
    assert (reply.status, reply.json["code"]) == (400, "region_gone")
    gpu.lost = False
    gpu.bytes[:1536] = X.numpy().tobytes()
    y = np.array(infer(served, "m.plain", body).json["outputs"][0]["data"], np.float32)
    assert y.tobytes() == raw(infer(served, "m.plain", *message(X)).tensor)


def test_it_is_for_a_server_that_computes_on_a_gpu() -> None:
    options = Settings.model_validate({"cuda_shm": True, "device": "cpu"})
    with pytest.raises(SettingsError, match="--cuda-shm needs a CUDA device"):
        shm_openers.openers_of(options, "cpu")
