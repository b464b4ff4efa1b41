"""System shared memory: as the unmodified tritonclient uses it, and as somebody does who means harm."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.http as triton
import tritonclient.utils.shared_memory as triton_shm
from torch import Tensor
from tritonclient.utils import InferenceServerException

from gemmwire_service import shm
from http_calls import Reply, call, infer, message, raw
from oracle import assert_rows_close, reference, spread
from serving import Served, hold, serving, settings, until
from shm_objects import FOLDER, PREFIX, Object, made

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not os.path.isdir(FOLDER), reason=f"needs {FOLDER}"
)

X = spread(3, 128, seed=1)
DATA = raw(X)
Y_BYTES = 3 * 64 * 4
NUMPY = {"FP32": np.float32, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def served(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    options = settings(
        model=(f"m={checkpoint}",), shm_prefix=PREFIX, max_body_bytes=1 << 20, fast_path=request.param
    )
    with serving(options) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_regions_left(served: Served) -> Iterator[None]:
    """Each test begins without any, and leaves the server at work."""
    yield
    call(served, "POST", "/v2/systemsharedmemory/unregister")
    assert infer(served, "m.plain", *message(X)).status == 200


@pytest.fixture
def region(served: Served) -> Iterator[Object]:
    """An object of 64 KiB that holds x, registered as "r"."""
    with made() as found:
        found.put(DATA)
        assert register(served, key=found.key).status == 200
        yield found


def register(served: Served, name: str = "r", **fields: Any) -> Reply:
    body = {"key": f"/{PREFIX}-object", "byte_size": 1 << 16} | fields
    return call(served, "POST", f"/v2/systemsharedmemory/region/{name}/register", json.dumps(body).encode())


def unregister(served: Served, name: str = "r") -> Reply:
    return call(served, "POST", f"/v2/systemsharedmemory/region/{name}/unregister")


def names(served: Served) -> list[str]:
    return [entry["name"] for entry in call(served, "GET", "/v2/systemsharedmemory/status").json]


def place(region: str, nbytes: int, offset: int = 0) -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }


def shared_body(x: dict[str, Any] | None = None, y: dict[str, Any] | None = None, rows: int = 3) -> bytes:
    source = place("r", rows * 512) | (x or {})
    tensor = {"name": "x", "shape": [rows, 128], "datatype": "FP32", "parameters": source}
    output = {"name": "y", "parameters": place("r", Y_BYTES, 32768) | (y or {})}
    return json.dumps({"inputs": [tensor], "outputs": [output]}).encode()


def infer_shared(served: Served, body: bytes | None = None) -> Reply:
    return infer(served, "m.plain", body or shared_body())


def answer_of(served: Served, x: Tensor = X) -> bytes:
    """The same rows through the body, one forward of the same bucket: the same bits."""
    reply = infer(served, "m.plain", *message(x))
    assert reply.status == 200
    return raw(reply.tensor)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- tritonclient ---


@contextmanager
def triton_region(client: Any, name: str, nbytes: int) -> Iterator[Any]:
    key = f"/{PREFIX}-{name}"
    handle = triton_shm.create_shared_memory_region(name, key, nbytes)
    try:
        client.register_system_shared_memory(name, key, nbytes)
        yield handle
    finally:
        client.unregister_system_shared_memory(name)
        triton_shm.destroy_shared_memory_region(handle)


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as connected:
        yield connected


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("layer", ["ragged", "plain"])
def test_tritonclient_sends_and_receives_in_shared_memory(
    client: Any, weights: dict[str, Tensor], datatype: str, layer: str
) -> None:
    n, k = weights[f"{layer}.weight"].shape
    x = spread(5, k, seed=4) / 64
    array = x.numpy().astype(NUMPY[datatype])
    with triton_region(client, "in", 1 << 16) as source, triton_region(client, "out", 1 << 16) as target:
        triton_shm.set_shared_memory_region(source, [array], offset=256)
        tensor = triton.InferInput("x", [5, k], datatype)
        tensor.set_shared_memory("in", array.nbytes, offset=256)
        output = triton.InferRequestedOutput("y", binary_data=True)
        output.set_shared_memory("out", 5 * n * array.itemsize + 64, offset=192)
        for _ in range(2):  # the second is remembered
            answer = client.infer(f"m.{layer}", [tensor], outputs=[output], request_id="r-1")
            y = triton_shm.get_contents_as_numpy(target, NUMPY[datatype], [5, n], 192).astype(np.float32)
            assert_rows_close(
                torch.from_numpy(y), reference(x, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))
            )
            triton_shm.set_shared_memory_region(target, [np.zeros(8192, np.float32)])
    assert answer.get_response()["id"] == "r-1"
    assert answer.get_output("y") == {
        "name": "y",
        "shape": [5, n],
        "datatype": datatype,
        "parameters": place("out", 5 * n * array.itemsize, 192),
    }


def test_tritonclient_mixes_shared_memory_with_the_body(client: Any, weights: dict[str, Tensor]) -> None:
    expected = reference(X, weights["plain.weight"])
    with triton_region(client, "r", 1 << 16) as handle:
        triton_shm.set_shared_memory_region(handle, [X.numpy()])
        shared = triton.InferInput("x", [3, 128], "FP32")
        shared.set_shared_memory("r", X.numpy().nbytes)
        y = client.infer("m.plain", [shared]).as_numpy("y")
        assert_rows_close(torch.from_numpy(y.copy()), expected)

        sent = triton.InferInput("x", [3, 128], "FP32")
        sent.set_data_from_numpy(X.numpy())
        output = triton.InferRequestedOutput("y")
        output.set_shared_memory("r", Y_BYTES, offset=4096)
        client.infer("m.plain", [sent], outputs=[output])
        y = triton_shm.get_contents_as_numpy(handle, np.float32, [3, 64], 4096)
        assert_rows_close(torch.from_numpy(y.copy()), expected)


def test_tritonclient_reads_the_status(client: Any) -> None:
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]
    assert client.get_system_shared_memory_status() == []
    with triton_region(client, "a", 4096), triton_region(client, "b", 8192):
        entry = {"name": "b", "key": f"/{PREFIX}-b", "offset": 0, "byte_size": 8192}
        assert client.get_system_shared_memory_status("b") == [entry]
        assert [each["name"] for each in client.get_system_shared_memory_status()] == ["a", "b"]
        client.unregister_system_shared_memory("a")
        assert client.get_system_shared_memory_status() == [entry]
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="not registered") as raised:
        client.get_system_shared_memory_status("b")
    assert raised.value.status() == "404"
    client.unregister_system_shared_memory("b")  # gone already, as perf_analyzer does
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []


def test_tritonclient_hears_why_a_region_is_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=f"begin with '{PREFIX}'"):
        client.register_system_shared_memory("r", "/elsewhere", 64)


# --- what is read, and when ---


def test_both_ends_of_a_request_in_one_region(served: Served, region: Object) -> None:
    for _ in range(3):
        region.put(bytes(Y_BYTES), 32768)
        reply = infer_shared(served)
        assert (reply.status, len(reply.body) < 1000) == (200, True)
        assert region.get(Y_BYTES, 32768) == answer_of(served)
    assert region.get(64, 32768 + Y_BYTES) == bytes(64)


def test_a_remembered_request_reads_what_is_there_now(served: Served, region: Object) -> None:
    """Guards: the numbers of the first request for all that have the same JSON."""
    for seed in range(4):
        x = spread(3, 128, seed=seed)
        region.put(raw(x))
        assert infer_shared(served).status == 200
        assert region.get(Y_BYTES, 32768) == answer_of(served, x)


def test_a_name_that_was_registered_again_means_the_new_object(served: Served, region: Object) -> None:
    """Guards: a remembered request that goes on reading and writing the old one."""
    assert infer_shared(served).status == 200
    unregister(served)
    x = spread(3, 128, seed=8)
    with made(name="other") as other:
        other.put(raw(x), 4096)
        assert register(served, key=other.key, offset=4096, byte_size=61440).status == 200
        region.put(bytes(Y_BYTES), 32768)
        assert infer_shared(served).status == 200
        assert other.get(Y_BYTES, 4096 + 32768) == answer_of(served, x)
    assert region.get(Y_BYTES, 32768) == bytes(Y_BYTES)


def test_x_is_what_it_was_when_the_request_came(served: Served, region: Object) -> None:
    """Guards: rows that change after they were looked at, or while they are computed."""
    expected = answer_of(served)
    gate = threading.Event()
    with in_flight(served, gate) as replies:
        region.put(bytes(len(DATA)))
        gate.set()
    assert replies[0].status == 200
    assert region.get(Y_BYTES, 32768) == expected


def test_quantized_rows_may_lie_in_shared_memory(served: Served, region: Object) -> None:
    codes = np.tile(np.arange(0x30, 0x50, dtype=np.uint8), 12)
    scales = np.full(12, 127, np.uint8)
    region.put(codes.tobytes())
    region.put(scales.tobytes(), 1024)
    inputs = [
        {"name": "x_e4m3", "shape": [3, 128], "datatype": "UINT8", "parameters": place("r", 384)},
        {"name": "x_scale_e8m0", "shape": [3, 4], "datatype": "UINT8", "parameters": place("r", 12, 1024)},
    ]
    body = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    x = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().view(3, 128)
    for _ in range(2):
        reply = infer(served, "m.plain", body)
        assert raw(reply.tensor) == answer_of(served, x.bfloat16())


def test_a_request_without_rows(served: Served, region: Object) -> None:
    reply = infer_shared(served, shared_body(rows=0))
    assert reply.json["outputs"][0]["parameters"] == place("r", 0, 32768)
    assert region.get(64, 32768) == bytes(64)


# --- registering ---


def symlink(path: str) -> None:
    os.symlink("/etc/hostname", path)


def named_pipe(path: str) -> None:
    os.mkfifo(path)


def listener(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)


def second_name(path: str) -> None:
    Path(path + "-first").write_bytes(bytes(64))
    os.link(path + "-first", path)


def of_another_user(path: str) -> None:
    if os.geteuid():
        pytest.skip("only root can give an object away")
    Path(path).write_bytes(bytes(64))
    os.chown(path, 65534, -1)


@pytest.mark.parametrize(
    "make",
    [symlink, named_pipe, listener, os.mkdir, second_name, of_another_user],
    ids=lambda make: make.__name__,
)
def test_what_a_client_did_not_make_as_an_object_is_refused(
    served: Served, make: Callable[[str], None]
) -> None:
    """Guards: any file that the server may open, read and written for whoever asks."""
    name = f"{PREFIX}-{make.__name__}"
    path = os.path.join(FOLDER, name)
    before = open_files()
    try:
        make(path)
        reply = register(served, key=name, byte_size=8)
        assert (reply.status, reply.json["code"]) == (400, "region_refused"), reply.body
    finally:
        for each in (path, path + "-first"):
            if os.path.isdir(each):
                os.rmdir(each)
            elif os.path.lexists(each):
                os.unlink(each)
    assert names(served) == []
    assert open_files() <= before + 1  # of the connection that is being closed


LEASE = """
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("leased", flush=True)
time.sleep(60)
"""


def test_an_object_that_somebody_has_a_lease_on_is_not_waited_for(served: Served) -> None:
    """Guards: an open that holds up every other request for as long as its client likes."""
    with made() as found:
        found.close()  # a lease is given for what nobody else has open
        with subprocess.Popen([sys.executable, "-c", LEASE, found.path], stdout=subprocess.PIPE) as holder:
            try:
                assert holder.stdout is not None
                if holder.stdout.readline() != b"leased\n":
                    pytest.skip("this system gives no leases")
                reply = register(served, key=found.key)
            finally:
                holder.kill()
        assert (reply.status, reply.json["code"]) == (400, "region_refused")


KEYS = {
    "no-prefix": "/hidden",
    "prefix-of-the-prefix": "/" + PREFIX[:-1],
    "empty": "",
    "slash": "/",
    "prefix-twice-slashed": f"//{PREFIX}-object",
    "parent": f"/{PREFIX}/../hidden",
    "folder": f"/{PREFIX}-a/b",
    "absolute": "/etc/passwd",
    "dots": "/..",
    "null": f"/{PREFIX}-object\0",
    "line-break": f"/{PREFIX}-object\n",
    "not-ascii": f"/{PREFIX}-\u00fc",
    "long": f"/{PREFIX}-" + "a" * 300,
    "nobody's": f"/{PREFIX}-nobody",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
def test_a_key_that_no_client_can_have_is_refused(served: Served, key: str) -> None:
    reply = register(served, key=key, byte_size=8)
    assert (reply.status, reply.json["code"]) == (400, "region_refused"), reply.body
    assert len(reply.json["error"]) < 400
    assert FOLDER not in reply.json["error"]


def test_an_object_outside_the_prefix_is_refused_alike_whether_there_is_one_or_not(served: Served) -> None:
    """Guards: an oracle for the names of other people's memory, the server's own among them."""
    path = os.path.join(FOLDER, f"hidden-{os.getpid()}")
    Path(path).write_bytes(bytes(64))
    try:
        there = register(served, key=os.path.basename(path), byte_size=8)
        outside = register(served, key=os.path.basename(path) + "x", byte_size=8)
    finally:
        os.unlink(path)
    assert there.json["error"].replace(path[-9:], "") == outside.json["error"].replace(path[-9:], "").replace(
        "x'", "'"
    )


SIZES = {
    "more-than-there-is": ({"byte_size": 65537}, "region_range"),
    "behind-its-end": ({"offset": 65536, "byte_size": 1}, "region_range"),
    "sum-beyond-its-end": ({"offset": 1, "byte_size": 65536}, "region_range"),
    "sum-of-2^63": ({"offset": (1 << 63) - 1, "byte_size": 1}, "region_range"),
    "sum-of-2^64": ({"offset": (1 << 63) - 1, "byte_size": (1 << 63) - 1}, "region_range"),
    "size-2^63": ({"byte_size": 1 << 63}, "request_invalid"),
    "size-2^64": ({"byte_size": 1 << 64}, "request_invalid"),
    "size-10^400": ({"byte_size": 10**400}, "request_invalid"),
    "offset-2^63": ({"offset": 1 << 63}, "request_invalid"),
    "size-zero": ({"byte_size": 0}, "request_invalid"),
    "size-negative": ({"byte_size": -1}, "request_invalid"),
    "offset-negative": ({"offset": -4096}, "request_invalid"),
    "size-float": ({"byte_size": 64.0}, "request_invalid"),
    "size-1e400": ({"byte_size": float("inf")}, "request_invalid"),
    "size-text": ({"byte_size": "64"}, "request_invalid"),
    "size-true": ({"byte_size": True}, "request_invalid"),
    "size-null": ({"byte_size": None}, "request_invalid"),
    "offset-float": ({"offset": 0.5}, "request_invalid"),
    "key-number": ({"key": 5}, "request_invalid"),
    "held-by-nobody": ({"held": True}, "region_refused"),
    "held-number": ({"held": 1}, "request_invalid"),
}


@pytest.mark.parametrize(("fields", "code"), SIZES.values(), ids=SIZES.keys())
def test_a_part_that_an_object_does_not_have_is_refused(
    served: Served, fields: dict[str, Any], code: str
) -> None:
    with made() as found:
        reply = register(served, **{"key": found.key} | fields)
        assert (reply.status, reply.json["code"]) == (400, code), reply.body
        assert names(served) == []
        assert register(served, key=found.key, offset=65472, byte_size=64).status == 200


def test_a_body_that_is_no_registration(served: Served) -> None:
    for body in (b"", b"[]", b"{", b'{"key": "a"}', b"\xff", b"[" * 2000):
        reply = call(served, "POST", "/v2/systemsharedmemory/region/r/register", body)
        assert (reply.status, reply.json["code"]) == (400, "request_invalid"), reply.body


def test_a_name_is_taken_once_and_is_not_long(served: Served, region: Object) -> None:
    again = register(served, key=region.key)
    assert (again.status, again.json["code"]) == (409, "region_exists")
    long = register(served, "n" * 256, key=region.key)
    assert (long.status, long.json["code"]) == (400, "region_refused")
    assert names(served) == ["r"]


def test_there_is_a_limit_to_regions(served: Served, region: Object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "MOST", 2)
    assert register(served, "second", key=region.key).status == 200
    reply = register(served, "third", key=region.key)
    assert (reply.status, reply.json["code"]) == (503, "region_limit")
    unregister(served)
    assert register(served, "third", key=region.key).status == 200


# --- infer ---


def bad(where: str, **fields: Any) -> bytes:
    changes = {f"shared_memory_{name}": value for name, value in fields.items()}
    return shared_body(x=changes) if where == "x" else shared_body(y=changes)


REQUESTS = {
    "x-of-no-region": (bad("x", region="nowhere"), 404, "region_unknown"),
    "y-of-no-region": (bad("y", region="nowhere"), 404, "region_unknown"),
    "x-of-a-key": (bad("x", region=f"/{PREFIX}-object"), 404, "region_unknown"),
    "x-beyond": (bad("x", offset=65536 - 1535), 400, "region_range"),
    "x-far-beyond": (bad("x", offset=(1 << 63) - 1), 400, "region_range"),
    "x-negative": (bad("x", offset=-1), 400, "request_invalid"),
    "x-wrapped": (bad("x", offset=1 << 64), 400, "request_invalid"),
    "x-float": (bad("x", offset=0.0), 400, "request_invalid"),
    "x-other-size": (bad("x", byte_size=1537), 400, "frame_invalid"),
    "y-beyond": (bad("y", offset=65536 - 767), 400, "region_range"),
    "y-far-beyond": (bad("y", offset=(1 << 63) - 1), 400, "region_range"),
    "y-size-beyond": (bad("y", byte_size=(1 << 63) - 1), 400, "region_range"),
    "y-negative": (bad("y", byte_size=-768), 400, "request_invalid"),
    "y-too-small": (bad("y", byte_size=767), 400, "region_range"),
    "x-too-large": (shared_body(rows=2049), 413, "body_too_large"),
    "x-huge": (shared_body({"shared_memory_byte_size": 1 << 50}, rows=1 << 41), 400, "region_range"),
}


@pytest.mark.parametrize(("body", "status", "code"), REQUESTS.values(), ids=REQUESTS.keys())
def test_a_place_that_a_region_does_not_have_is_refused(
    served: Served, body: bytes, status: int, code: str
) -> None:
    executions = served.engine.layers["m.plain"].stats.executions
    with made(2 << 20) as found:
        size = 1 << 16 if code != "body_too_large" else 2 << 20
        assert register(served, key=found.key, byte_size=size).status == 200
        for _ in range(2):
            reply = infer_shared(served, body)
            assert (reply.status, reply.json["code"]) == (status, code), reply.body
            assert set(reply.json) == {"error", "code", "expected", "got", "request_id"}
            assert PREFIX not in reply.json["error"].replace(f"/{PREFIX}-object", "")
        assert served.engine.layers["m.plain"].stats.executions == executions
        assert infer_shared(served).status == 200


def test_a_shared_tensor_has_no_second_place(served: Served, region: Object) -> None:
    tensor = {"name": "x", "shape": [1, 128], "datatype": "FP32", "data": [0.0] * 128}
    body = json.dumps({"inputs": [tensor | {"parameters": place("r", 512)}]}).encode()
    reply = infer_shared(served, body)
    assert (reply.status, reply.json["code"]) == (400, "frame_invalid")
    assert infer_shared(served).status == 200


# --- owners that change their mind, or die ---


@pytest.mark.parametrize("remembered", [False, True], ids=["first", "remembered"])
def test_an_object_that_shrinks_costs_its_own_requests_alone(
    served: Served, region: Object, remembered: bool
) -> None:
    """Guards: SIGBUS, which a mapping of an object answers with, and which ends the server."""
    if remembered:
        assert infer_shared(served).status == 200
    for size in (0, 100, 1535):
        region.resize(size)
        reply = infer_shared(served)
        assert (reply.status, reply.json["code"]) == (400, "region_gone"), reply.body
    region.resize(4096)  # x is there, and no place for y
    region.put(DATA)
    reply = infer_shared(served)
    assert (reply.status, reply.json["code"]) == (400, "region_gone"), reply.body
    assert region.size == 4096
    region.resize(1 << 16)
    assert infer_shared(served).status == 200
    assert region.get(Y_BYTES, 32768) == answer_of(served)


def test_an_object_that_shrinks_under_a_request(served: Served, region: Object) -> None:
    gate = threading.Event()
    with in_flight(served, gate) as replies:
        region.resize(0)
        gate.set()
    assert (replies[0].status, replies[0].json["code"]) == (400, "region_gone")
    assert region.size == 0


def test_an_object_is_used_until_it_is_unlinked(served: Served, region: Object) -> None:
    """Guards: memory that stays taken for as long as the server runs, of a client that is long gone."""
    before = open_files()
    region.unlink()
    assert infer_shared(served).status == 200
    assert names(served) == []
    assert open_files() <= before
    reply = infer_shared(served)
    assert (reply.status, reply.json["code"]) == (404, "region_unknown")


def test_a_region_goes_with_the_lock_of_its_owner(served: Served, region: Object) -> None:
    """Guards: the same, of a client that unlinks its object at once so that nothing is left of it."""
    unregister(served)
    fcntl.flock(region.file, fcntl.LOCK_SH)
    assert register(served, key=region.key, held=True).status == 200
    region.unlink()
    for _ in range(3):
        assert names(served) == ["r"]
        assert infer_shared(served).status == 200
    expected = answer_of(served)
    assert region.get(Y_BYTES, 32768) == expected
    region.close()  # as the system does for a process that dies
    assert names(served) == []


def test_nobody_has_to_ask_for_a_region_to_go(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SWEEP_S", 0.01)
    with serving(settings(model=(f"m={checkpoint}",), shm_prefix=PREFIX)) as served, made() as found:
        assert register(served, key=found.key).status == 200
        before = open_files()
        time.sleep(0.05)  # some sweeps that find nothing
        assert names(served) == ["r"]
        found.unlink()
        until(lambda: open_files() < before, "the region was kept")


def test_a_server_that_ends_keeps_nothing_open(checkpoint: Path) -> None:
    before = open_files()
    with serving(settings(model=(f"m={checkpoint}",), shm_prefix=PREFIX)) as served, made() as found:
        assert register(served, key=found.key).status == 200
        found.put(DATA)
        assert infer_shared(served).status == 200
        before_end = served.lane.infer.regions
    assert not before_end
    assert open_files() <= before


def test_unregistering_under_a_request_is_the_end_of_writing(served: Served, region: Object) -> None:
    """Guards: an answer written into memory that its owner has been told is free."""
    gate = threading.Event()
    with in_flight(served, gate) as replies:
        assert unregister(served).status == 200
        gate.set()
    assert (replies[0].status, replies[0].json["code"]) == (400, "region_gone")
    assert region.get(Y_BYTES, 32768) == bytes(Y_BYTES)


def test_an_answer_goes_to_the_region_that_the_name_meant(served: Served, region: Object) -> None:
    """Guards: a name that is registered again under a request: the other object's owner asked for nothing."""
    gate = threading.Event()
    with made(name="other") as other, in_flight(served, gate) as replies:
        unregister(served)
        assert register(served, key=other.key).status == 200
        gate.set()
        until(lambda: replies, "no answer came")
        assert other.get(Y_BYTES, 32768) == bytes(Y_BYTES)
    assert (replies[0].status, replies[0].json["code"]) == (400, "region_gone")


@contextmanager
def in_flight(served: Served, gate: threading.Event) -> Iterator[list[Reply]]:
    """A request whose x was read, and which waits for the device until the gate is set."""
    replies: list[Reply] = []
    hold(served.engine, gate)
    thread = threading.Thread(target=lambda: replies.append(infer_shared(served)), daemon=True)
    try:
        thread.start()
        until(lambda: served.engine.waiting, "the request did not come")
        yield replies
    finally:
        gate.set()
        thread.join(30)


# --- off ---


def test_it_is_off_unless_a_setting_says_so(server: Served) -> None:
    with made() as found:
        reply = register(server, key=found.key)
        assert (reply.status, reply.json["code"]) == (400, "shared_memory_unsupported")
        assert "--shm-prefix" in reply.json["error"]
        assert infer_shared(server).json["code"] == "shared_memory_unsupported"
        assert names(server) == []
        assert unregister(server).status == 200
        assert call(server, "POST", "/v2/systemsharedmemory/unregister").status == 200
    assert infer(server, "m.plain", *message(X)).status == 200


@pytest.mark.parametrize("prefix", ["ab", "/gemmwire", "a/b", "..", "psm", "torch_x", "nccl-x", "a" * 65])
def test_a_prefix_that_others_have_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"shm_prefix|it must be|libraries"):
        settings(shm_prefix=prefix)
