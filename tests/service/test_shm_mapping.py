"""Large tensors in shared memory are read in place: the same answers, and nothing that an owner can break."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmwire_service import shm_system
from gemmwire_service.compiled import NotCompiled
from gemmwire_service.shm_mapping import Loan, Mapper
from http_calls import Reply, call, infer, message, raw
from links import held
from oracle import spread
from serving import Served, serving, settings, until
from shm_objects import FOLDER, PREFIX, Object, made

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not os.path.isdir(FOLDER), reason=f"needs {FOLDER}"
)

ROWS = 700
X = spread(ROWS, 128, seed=1)
X_BYTES = ROWS * 512
Y_AT = 512 << 10
Y_BYTES = ROWS * 64 * 4
SIZE = 1 << 20


def options(checkpoint: Path, **fields: Any) -> Any:
    return settings(model=(f"m={checkpoint}",), shm_prefix=PREFIX, **fields)


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def served(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(options(checkpoint, fast_path=request.param)) as running:
        yield running


@pytest.fixture
def region(served: Served) -> Iterator[Object]:
    """A registered object that holds x, of which one request has been answered: the next is remembered."""
    with made(SIZE) as found:
        found.put(raw(X))
        register(served, found)
        assert ask(served).status == 200
        yield found
        call(served, "POST", "/v2/systemsharedmemory/unregister")
    assert infer(served, "m.plain", *message(X[:3])).status == 200, "the server goes on"


@pytest.fixture
def loans(monkeypatch: pytest.MonkeyPatch) -> list[Loan]:
    found: list[Loan] = []
    real = Loan.__init__

    def noting(self: Loan, *arguments: Any) -> None:
        real(self, *arguments)
        found.append(self)

    monkeypatch.setattr(Loan, "__init__", noting)
    return found


def register(served: Served, found: Object, **fields: Any) -> None:
    body = json.dumps({"key": found.key, "byte_size": SIZE} | fields).encode()
    assert call(served, "POST", "/v2/systemsharedmemory/region/r/register", body).status == 200


def place(nbytes: int, offset: int) -> dict[str, Any]:
    return {
        "shared_memory_region": "r",
        "shared_memory_byte_size": nbytes,
        "shared_memory_offset": offset,
    }


def ask(served: Served, at: int = 0) -> Reply:
    return ask_for(served, at, outputs=[{"name": "y", "parameters": place(Y_BYTES, Y_AT)}])


def ask_for_body(served: Served, at: int = 0) -> Reply:
    return ask_for(served, at, parameters={"binary_data_output": True})


def ask_for(served: Served, at: int, **answer: Any) -> Reply:
    x = {"name": "x", "shape": [ROWS, 128], "datatype": "FP32", "parameters": place(X_BYTES, at)}
    return infer(served, "m.plain", json.dumps({"inputs": [x], **answer}).encode())


def expected(served: Served, x: torch.Tensor = X) -> bytes:
    return raw(infer(served, "m.plain", *message(x)).tensor)


def refused(reply: Reply) -> bool:
    return (reply.status, reply.json.get("code")) == (400, "region_gone")


def mapped() -> int:
    """Mappings of objects of ours."""
    return Path("/proc/self/maps").read_text().count(f"{FOLDER}/{PREFIX}")


@pytest.mark.parametrize("at", [0, 4, 6, 4095])
def test_it_is_read_in_place_to_the_bits_of_a_body(
    served: Served, region: Object, loans: list[Loan], at: int
) -> None:
    for seed in range(4):
        x = spread(ROWS, 128, seed=seed)
        region.put(raw(x), at)
        assert ask(served, at).status == 200
        assert region.get(Y_BYTES, Y_AT) == expected(served, x)
        assert region.get(X_BYTES, at) == raw(x), "x is read alone"
    assert len(loans) >= 3


def test_bf16_goes_to_the_forward_as_it_lies_there(served: Served, region: Object, loans: list[Loan]) -> None:
    x = spread(2 * ROWS, 128, seed=9).bfloat16()
    region.put(raw(x))
    there = place(2 * x.numel(), 0)
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "BF16", "parameters": there}
    body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    for _ in range(3):
        assert raw(infer(served, "m.plain", body).tensor) == expected(served, x)
    assert len(loans) == 2


def test_few_bytes_are_copied_when_they_come(served: Served, region: Object, loans: list[Loan]) -> None:
    for rows in (512, 511):
        there = place(rows * 512, 0)
        tensor = {"name": "x", "shape": [rows, 128], "datatype": "FP32", "parameters": there}
        for _ in range(2):
            assert infer(served, "m.plain", json.dumps({"inputs": [tensor]}).encode()).status == 200
    assert len(loans) == 1


@pytest.mark.parametrize("size", [0, 100, X_BYTES - 1, X_BYTES])
def test_an_object_that_is_shorter_is_refused_until_it_is_not(
    served: Served, region: Object, size: int
) -> None:
    """Guards: SIGBUS; zeros for numbers; a mapping that is never made again."""
    region.resize(size)
    assert refused(ask(served))
    region.resize(SIZE)
    region.put(raw(X))
    assert ask(served).status == 200
    assert region.get(Y_BYTES, Y_AT) == expected(served)


def test_an_object_that_ends_within_the_last_page_of_x(
    served: Served, region: Object, loans: list[Loan]
) -> None:
    """Guards: zeros for numbers where nothing faults, for what is behind the end of a page reads as zeros."""
    assert [ask_for_body(served).status for _ in range(2)] == [200, 200]
    region.resize(X_BYTES - 1)
    assert refused(ask_for_body(served))
    assert len(loans) == 2


@pytest.mark.parametrize("size", [0, 4096, X_BYTES - 1])
def test_an_object_that_shrinks_under_a_request(served: Served, region: Object, size: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(served):
            asked = pool.submit(ask, served)
            until(lambda: served.engine.waiting == 1, "the request did not come")
            region.resize(size)
        assert refused(asked.result())
    assert region.size == size


def test_zeros_in_the_place_of_what_went_are_nobodys_answer(
    served: Served, region: Object, loans: list[Loan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an object that is whole again by the time that the answer is made."""
    from gemmwire_service.host import Host

    real = Host.forward

    def shrinking(self: Host, batch: Any) -> Any:
        region.resize(0)
        try:
            return real(self, batch)
        finally:
            region.resize(SIZE)

    with monkeypatch.context() as patch:
        patch.setattr(Host, "forward", shrinking)
        reply = ask(served)
        assert refused(reply)
        assert "shorter meanwhile" in reply.json["error"]
    region.put(raw(X))
    lent = len(loans)
    for _ in range(2):
        assert ask(served).status == 200
        assert region.get(Y_BYTES, Y_AT) == expected(served)
    assert len(loans) == lent, "holes that a full /dev/shm has no room for are read as a file"


def test_an_owner_that_never_rests(served: Served, region: Object) -> None:
    """Guards: a signal on some thread at some time; any answer is right or refused, or of what was there."""
    stop = threading.Event()
    chance = random.Random(0)

    def resize() -> None:
        while not stop.is_set():
            region.resize(chance.choice((0, 8192, X_BYTES // 2, SIZE)))

    with ThreadPoolExecutor(5) as pool:
        resizing = pool.submit(resize)
        replies = [each.result() for each in [pool.submit(ask, served) for _ in range(200)]]
        stop.set()
        resizing.result()
    assert all(reply.status == 200 or refused(reply) for reply in replies)
    assert any(map(refused, replies))
    region.resize(SIZE)
    region.put(raw(X))
    assert ask(served).status == 200
    assert region.get(Y_BYTES, Y_AT) == expected(served)


def test_unregistering_under_a_request_refuses_it(served: Served, region: Object) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(served):
            asked = pool.submit(ask, served)
            until(lambda: served.engine.waiting == 1, "the request did not come")
            assert call(served, "POST", "/v2/systemsharedmemory/region/r/unregister").status == 200
            assert mapped() == 1, "the forward has yet to read it"
        assert refused(asked.result())
    until(lambda: not mapped(), "the mapping was kept")
    assert region.get(Y_BYTES, Y_AT) == expected(served), "of the first request"


def test_nothing_stays_mapped(served: Served, region: Object) -> None:
    assert ask(served).status == 200
    assert mapped() == 1
    assert call(served, "POST", "/v2/systemsharedmemory/unregister").status == 200
    until(lambda: not mapped(), "the mapping was kept")


def test_without_a_compiler_it_is_copied_and_that_is_said(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(folder: Path | None) -> Mapper:
        raise NotCompiled("there is no C compiler")

    monkeypatch.setattr(shm_system, "Mapper", none)
    with serving(options(checkpoint)) as served, made(SIZE) as found:
        found.put(raw(X))
        register(served, found)
        for _ in range(3):
            assert ask(served).status == 200
            assert found.get(Y_BYTES, Y_AT) == expected(served)
        assert not mapped()
        found.resize(100)
        assert refused(ask(served))
    assert "copied instead of read in place: there is no C compiler" in caplog.text


def test_what_cannot_be_mapped_is_copied(
    served: Served, region: Object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(self: Mapper, file: int, nbytes: int) -> None:
        raise OSError("there is no more address space")

    monkeypatch.setattr(Mapper, "map", none)
    for _ in range(3):
        assert ask(served).status == 200
        assert region.get(Y_BYTES, Y_AT) == expected(served)
    assert caplog.text.count("there is no more address space") == 1


def test_an_object_of_nothing_but_holes_takes_no_address_space(served: Served, loans: list[Loan]) -> None:
    """Guards: clients whose objects, of a few pages, leave the server no addresses for its own memory."""
    size = 1 << 46
    with made(size, "holes") as found:
        register(served, found, byte_size=size)
        for at in (0, size - SIZE):
            found.put(raw(X), at)
            for _ in range(3):
                assert raw(ask_for_body(served, at).tensor) == expected(served)
        assert not mapped()
        assert not loans
        call(served, "POST", "/v2/systemsharedmemory/unregister")


_OTHERS = """
import ctypes, faulthandler, mmap, os, signal, sys
from pathlib import Path
{first}
from gemmwire_service.shm_mapping import Mapper
mapper = Mapper(None)
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(file, 8192)
own = mapper.map(file, 8192)
other = mmap.mmap(file, 8192)
os.ftruncate(file, 0)
assert bytes(own.data[:9]) == bytes(9) and own.gone
print("survived", flush=True)
{last}
"""


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ("", "other[0]", ""),
        ("faulthandler.enable()", "other[0]", "Fatal Python error: Bus error"),
        ("", "os.kill(os.getpid(), signal.SIGBUS); signal.pause()", ""),
    ],
    ids=["fault", "another-handler", "sent"],
)
def test_every_other_bus_error_is_what_it_was(tmp_path: Path, first: str, last: str, said: str) -> None:
    """Guards: a process that goes on, or in circles, where its own memory is broken."""
    code = _OTHERS.format(first=first, last=last)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "survived\n", done.stderr
    assert done.returncode == -signal.SIGBUS
    assert said in done.stderr


def test_mappings_are_counted_and_come_back(tmp_path: Path) -> None:
    """Guards: places of the handler's table that are never given back."""
    mapper = Mapper(tmp_path)
    with made(8192, "many") as found:
        for _ in range(3):
            kept = [mapper.map(found.file, 8192) for _ in range(1000)]
            assert len({id(each.data.obj) for each in kept}) == 1000
            part = kept[0].data[5000:5003]
            del kept
            assert mapped() == 1
            found.put(b"abc", 5000)
            assert bytes(part) == b"abc"
            del part
            assert not mapped()
        with pytest.raises(OSError, match="cannot be mapped"):
            _ = [mapper.map(found.file, 8192) for _ in range(1025)]


_MOVED = """
import ctypes, os, sys, threading, time
from pathlib import Path
from gemmwire_service import shm_mapping
source = Path(shm_mapping.SHM_MAPPING).read_text()
reading = "size_t nbytes = atomic_load(&mappings[i].nbytes);"
assert reading in source.partition("static void on_bus_error")[0]
slow = Path(sys.argv[1], "slow.c")
slow.write_text(source.replace(reading, "if (i == 0) usleep(400000);" + reading, 1))
shm_mapping.SHM_MAPPING = slow
mapper = shm_mapping.Mapper(None)

def opened(name, nbytes):
    file = os.open(Path(sys.argv[1], name), os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(file, nbytes)
    return file

def address(mapping):
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping.data))

page, large = 4096, 1 << 30
first, lost, other = opened("first", page), opened("lost", page), opened("other", large)
place = mapper.map(first, page)  # has the first place of the table
own = mapper.map(lost, page)
del place
low = mapper.map(other, 64 << 20)  # has it now, below
at, start = address(own), address(low)
assert start < at < start + large, (hex(start), hex(at))
os.ftruncate(lost, 0)
copied = ctypes.create_string_buffer(page)
reader = threading.Thread(target=ctypes.memmove, args=(copied, at, page))
reader.start()
time.sleep(0.1)
del low
high = mapper.map(other, large)
reader.join()
assert own.gone and not high.gone and copied.raw == bytes(page)
print("whole", flush=True)
"""


def test_a_place_that_is_given_to_another_meanwhile(tmp_path: Path) -> None:
    """Guards: zeros over memory that is nobody's mapping, by the start of one and the size of another."""
    done = subprocess.run(
        [sys.executable, "-c", _MOVED, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == ("whole\n", 0), done.stderr
