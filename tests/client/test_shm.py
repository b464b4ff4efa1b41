"""Client.shared: the same answers through shared memory, and nothing left of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gemmwire
from gemmwire import shm
from gemmwire.shared_client import SharedClient
from gemmwire.shm import places
from http_calls import call
from scripted_server import Script, answer, serve
from serving import Served, hold, serving, settings, until
from shm_objects import FOLDER, PREFIX

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not os.path.isdir(FOLDER), reason=f"needs {FOLDER}"
)

X = np.linspace(-2, 2, 5 * 128, dtype=np.float32).reshape(5, 128)


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = settings(
        model=(f"m={checkpoint}", "demo=glassllm"),
        fuse=("qkv=W_Q+W_K+W_V",),
        shm_prefix=PREFIX,
        uds=str(tmp_path_factory.mktemp("shm") / "s"),
    )
    with serving(options) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[gemmwire.Client]:
    with gemmwire.Client(served.url, timeout=20.0) as connected:
        yield connected


@pytest.fixture
def shared(client: gemmwire.Client) -> Iterator[SharedClient]:
    with client.shared(PREFIX, at_least=0) as found:
        assert isinstance(found, SharedClient)
        yield found


def regions(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(served, "GET", "/v2/systemsharedmemory/status").json
    return found


def objects() -> list[str]:
    return [name for name in os.listdir(FOLDER) if name.startswith(PREFIX)]


@pytest.fixture(autouse=True)
def _nothing_left(served: Served) -> Iterator[None]:
    yield
    assert objects() == []
    assert regions(served) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(128,), (5, 128), (2, 3, 128), (0, 128)])
def test_y_is_that_of_the_body(
    client: gemmwire.Client, shared: SharedClient, shape: tuple[int, ...], dtype: Any
) -> None:
    x = np.resize(X, shape).astype(dtype)
    expected = client.infer("m.plain", x)
    for _ in range(3):
        y = shared.infer("m.plain", x)
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(y, expected)


def test_the_tensors_are_not_in_the_messages(served: Served, shared: SharedClient) -> None:
    """Guards: a shared client that shares nothing."""
    sizes = []
    send = shared._transport.send

    def counted(request: Any, timeout: float | None) -> Any:
        reply = send(request, timeout)
        sizes.append((sum(map(len, request.body)), len(reply.body)))
        return reply

    shared._transport.send = counted  # type: ignore[method-assign]
    try:
        shared.infer("m.plain", np.resize(X, (512, 128)))
    finally:
        del shared._transport.send
    assert max(sizes[-1]) < 600


def test_torch_tensors_and_another_datatype(client: gemmwire.Client, shared: SharedClient) -> None:
    x = torch.from_numpy(X).to(torch.bfloat16)
    y = shared.infer("m.plain", x, output_dtype="FP32")
    assert y.dtype is torch.float32
    assert torch.equal(y, client.infer("m.plain", x, output_dtype="FP32"))


def test_rows_that_the_client_quantizes(client: gemmwire.Client, shared: SharedClient) -> None:
    expected = client.infer("m.ragged", X[:, :33], quantize="client")
    np.testing.assert_array_equal(shared.infer("m.ragged", X[:, :33], quantize="client"), expected)


def test_the_parts_of_a_fused_layer(client: gemmwire.Client, shared: SharedClient) -> None:
    layer = next(info for info in client.layers() if info.name.endswith("qkv"))
    x = np.resize(X, (3, layer.k))
    names = ["y", *(part["name"] for part in client.layer(layer.name).config["parts"])]
    expected = client.call(layer.name, x, outputs=names).outputs
    got = shared.call(layer.name, x, outputs=names).outputs
    assert list(got) == names
    for name in names:
        np.testing.assert_array_equal(got[name], expected[name])


def test_an_answer_is_its_callers_own(shared: SharedClient) -> None:
    """Guards: an array over memory that the next call writes to."""
    first = shared.infer("m.plain", X)
    kept = first.copy()
    first += 0  # it is writable
    shared.infer("m.plain", -X)
    np.testing.assert_array_equal(first, kept)


def test_memory_is_kept_for_the_next_call(served: Served, shared: SharedClient) -> None:
    for rows in (1, 5, 3, 5):
        shared.infer("m.plain", X[:rows])
    assert [entry["byte_size"] for entry in regions(served)] == [1 << 16]
    shared.infer("m.plain", np.resize(X, (400, 128)))
    until(lambda: [entry["byte_size"] for entry in regions(served)] == [1 << 19], "the small one was kept")
    assert objects() == []  # none has a name


def test_few_bytes_go_in_the_body(served: Served, client: gemmwire.Client) -> None:
    with client.shared(PREFIX) as shared:
        np.testing.assert_array_equal(shared.infer("m.plain", X), client.infer("m.plain", X))
        assert regions(served) == []
        shared.infer("m.plain", np.resize(X, (1000, 128)))
        assert len(regions(served)) == 1
    assert client.live()  # it is open still


def test_threads_have_memory_of_their_own(client: gemmwire.Client, shared: SharedClient) -> None:
    xs = [X * (1 + i) for i in range(8)]
    expected = [client.infer("m.plain", x) for x in xs]
    wrong: list[int] = []

    def repeat(i: int) -> None:
        for _ in range(20):
            if not np.array_equal(shared.infer("m.plain", xs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_many_calls_take_turns(served: Served, client: gemmwire.Client, shared: SharedClient) -> None:
    calls = [("m.plain", X * i) for i in range(20)]
    expected = client.infer_many(calls)
    for y, each in zip(shared.infer_many(calls, at_once=4), expected, strict=True):
        np.testing.assert_array_equal(y, each)
    assert len(regions(served)) <= 4


def test_errors_are_those_of_the_body(served: Served, shared: SharedClient) -> None:
    with pytest.raises(gemmwire.BadRequest, match=r"takes x\[\.\.\., 128\]"):
        shared.infer("m.plain", X[:, :127])
    with pytest.raises(gemmwire.NotFound):
        shared.infer("m.nowhere", X)
    with pytest.raises(gemmwire.NotFound):
        shared.infer("m.plain", X, version=99)
    assert shared.infer("m.plain", X).shape == (5, 64)
    assert len(regions(served)) == 1


def test_another_prefix_is_refused_by_name(client: gemmwire.Client) -> None:
    with (
        client.shared("elsewhere", at_least=0) as shared,
        pytest.raises(gemmwire.BadRequest, match=f"begin with '{PREFIX}'"),
    ):
        shared.infer("m.plain", X)
    assert not [name for name in os.listdir(FOLDER) if name.startswith("elsewhere")]


def test_a_server_that_offers_none_says_how_it_would(server: Served) -> None:
    with (
        gemmwire.Client(server.url) as client,
        client.shared(at_least=0) as shared,
        pytest.raises(gemmwire.BadRequest, match="--shm-prefix"),
    ):
        shared.infer("m.plain", X)


def test_memory_that_is_not_there_is_no_signal(
    client: gemmwire.Client, shared: SharedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: SIGBUS in the caller's process where /dev/shm is small, as in a container."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(gemmwire.InvalidArgument, match="No space left"):
        shared.infer("m.plain", X)
    monkeypatch.undo()
    np.testing.assert_array_equal(shared.infer("m.plain", X), client.infer("m.plain", X))


def test_a_server_that_has_forgotten_is_told_again(
    served: Served, client: gemmwire.Client, shared: SharedClient
) -> None:
    """Guards: a client that fails for ever once somebody has unregistered all, or after a restart."""
    expected = client.infer("m.plain", X)
    for _ in range(3):
        np.testing.assert_array_equal(shared.infer("m.plain", X), expected)
        call(served, "POST", "/v2/systemsharedmemory/unregister")
    for y in shared.infer_many([("m.plain", X)] * 3):
        np.testing.assert_array_equal(y, expected)
    call(served, "POST", "/v2/systemsharedmemory/unregister")  # several that the client has kept
    np.testing.assert_array_equal(shared.infer("m.plain", X), expected)


def test_a_call_that_was_given_up_does_not_disturb_the_next(served: Served, shared: SharedClient) -> None:
    """Guards: the late answer of a call that timed out, in the memory of another."""
    expected = shared.infer("m.plain", X)
    gate = threading.Event()
    hold(served.engine, gate)
    try:
        with pytest.raises(gemmwire.GemmwireError):
            shared.infer("m.plain", -X, timeout=0.2)
    finally:
        gate.set()
    for _ in range(3):
        np.testing.assert_array_equal(shared.infer("m.plain", X), expected)
    until(lambda: len(regions(served)) == 1, "the memory of the lost call was kept")


def test_an_attempt_after_a_lost_one_has_other_memory(served: Served, shared: SharedClient) -> None:
    """Guards: the answer of an attempt that the client takes for lost, written into the next call's y."""
    names = []
    send = shared._transport.send

    def losing(request: Any, timeout: float | None) -> Any:
        if not request.path.endswith("/infer"):
            return send(request, timeout)
        names.append(json.loads(bytes(request.body[0]))["inputs"][0]["parameters"]["shared_memory_region"])
        if len(names) == 1:
            raise gemmwire.ConnectionFailed("lost")
        return send(request, timeout)

    shared._transport.send = losing  # type: ignore[method-assign]
    try:
        shared.infer("m.plain", X)
    finally:
        del shared._transport.send
    assert len(set(names)) == 2
    until(lambda: [entry["name"] for entry in regions(served)] == names[1:], "the lost one was kept")


def test_a_client_that_is_killed_leaves_nothing(served: Served) -> None:
    """Guards: memory that a dead process holds by its name, or by the server's open file."""
    code = (
        "import sys, time, numpy, gemmwire\n"
        "shared = gemmwire.Client(sys.argv[1]).shared(sys.argv[2], at_least=0)\n"
        "shared.infer('m.plain', numpy.ones((5, 128), numpy.float32))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, served.url, PREFIX]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert len(regions(served)) == 1
        assert objects() == []
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert regions(served) == []


def test_a_client_that_is_dropped_leaves_nothing(served: Served, client: gemmwire.Client) -> None:
    shared = client.shared(PREFIX, at_least=0)
    shared.infer("m.plain", X)
    assert len(regions(served)) == 1
    del shared
    assert regions(served) == []


def test_a_fork_has_memory_of_its_own(client: gemmwire.Client, shared: SharedClient) -> None:
    """Guards: two processes that write x to one place."""
    idle = shared._idle
    region = shm.Region(PREFIX, 1 << 16)
    region.unlink()
    idle.put(region)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        queue.put(idle.take(1) is None)

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert queue.get() is True
    assert idle.take(1) is region


def test_it_goes_by_a_unix_socket(served: Served, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    options = settings(model=(f"m={checkpoint}",), shm_prefix=PREFIX, uds=str(path))
    with (
        serving(options),
        gemmwire.Client(f"unix://{path}") as client,
        client.shared(PREFIX, at_least=0) as shared,
    ):
        np.testing.assert_array_equal(shared.infer("m.plain", X), client.infer("m.plain", X))


def reply_at(place: dict[str, Any] | None, config: dict[str, Any]) -> Script:
    """A server that registers anything, and whose answers are where it likes."""

    def script(session: Any, served: Any) -> None:
        while (request := session.request()) is not None:
            if request.path.endswith("/config"):
                session.send(answer(json.dumps(config).encode()))
            elif request.path.endswith("/infer"):
                asked = json.loads(request.body)["outputs"][0]["parameters"]
                y = {"name": "y", "shape": [5, 64], "datatype": "FP32"}
                y |= {"data": [0.0] * 320} if place is None else {"parameters": asked | place}
                document = {"model_name": "m", "model_version": "1", "outputs": [y]}
                session.send(answer(json.dumps(document).encode()))
            else:
                session.send(answer(b"{}"))

    return script


@pytest.mark.parametrize(
    "place",
    [
        None,
        {"shared_memory_region": "other"},
        {"shared_memory_offset": 1 << 40},
        {"shared_memory_offset": 0},
        {"shared_memory_byte_size": 64},
    ],
    ids=["body", "region", "offset-beyond", "offset-of-x", "size"],
)
def test_an_answer_elsewhere_is_refused(place: dict[str, Any] | None) -> None:
    """Guards: y made of x, or of memory that the server chose."""
    config = {"name": "m", "n": 64, "k": 128, "version": "1"}
    with (
        serve(reply_at(place, config)) as scripted,
        gemmwire.Client(scripted.url) as client,
        client.shared(PREFIX, at_least=0) as shared,
        pytest.raises(gemmwire.WireError),
    ):
        shared.infer("m", X)


def test_places_lie_beside_each_other_and_grow_by_doubling() -> None:
    assert places([]) == ([], 1 << 16)
    assert places([0]) == ([0], 1 << 16)
    assert places([100, 1, 64]) == ([0, 128, 192], 1 << 16)
    assert places([1 << 16, 1]) == ([0, 1 << 16], 1 << 17)
    assert places([1 << 17]) == ([0], 1 << 17)


def test_other_systems_are_told(client: gemmwire.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(gemmwire.InvalidArgument, match="needs Linux"):
        client.shared()


def test_calls_are_timed(shared: SharedClient) -> None:
    """Guards: a shared call that forgets the timeout."""
    began = time.monotonic()
    with pytest.raises(gemmwire.GemmwireError):
        shared.infer_many([("m.plain", X)] * 100, timeout=1e-3, at_once=1)
    assert time.monotonic() - began < 20
