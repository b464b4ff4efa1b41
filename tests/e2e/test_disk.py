"""Disks that are full, files that go away, memory that ends: what was served is served on."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from http_calls import HEADER_LENGTH, TORCH, raw
from oracle import assert_same_bits, reference, rounded_once, sparse
from safetensors_bytes import entry, frame
from serving import until
from tampered import Tampered, tampered

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limits of a process"),
]

N, K = 96, 256
X = sparse(3, K, torch.Generator().manual_seed(9)).to(torch.bfloat16)


def weight(seed: int) -> Tensor:
    return sparse(N, K, torch.Generator().manual_seed(seed))


def put(folder: Path, seed: int, layers: int = 4) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {f"{index}.weight": weight(seed + index) for index in range(layers)}, folder / "model.safetensors"
    )
    return folder


def send(
    server: Tampered, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes, dict[str, str]]:
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        link.request("POST", path, body, headers)
        reply = link.getresponse()
        return reply.status, reply.read(), {name.lower(): value for name, value in reply.getheaders()}
    finally:
        link.close()


def load(server: Tampered, model: str) -> tuple[int, dict[str, object]]:
    status, body, _ = send(server, f"/v2/repository/models/{model}/load", b"{}", {})
    return status, json.loads(body)


def assert_serves(server: Tampered, layer: str, seed: int) -> None:
    status, body, headers = send(server, f"/v2/models/{layer}/infer", raw(X), {HEADER_LENGTH: "0"})
    assert status == 200, body
    numbers = bytearray(body[int(headers[HEADER_LENGTH.lower()]) :])
    y = torch.frombuffer(numbers, dtype=TORCH["BF16"]).view(3, N)
    assert_same_bits(y, rounded_once(reference(X, weight(seed))))


def end(server: Tampered) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.text


@contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """A folder on a disk of 16 KiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def small_files() -> None:
    """No file of more than 8 KiB can be written; to do so is an error, as Python has it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def test_a_disk_that_is_full_costs_the_caches_alone(tmp_path: Path) -> None:
    """Guards: a server that does not start because it could not keep what it only wanted to keep."""
    model = put(tmp_path / "m", 1)
    with full_disk(tmp_path / "disk") as disk:
        caches = ("--cache-dir", str(disk / "plans"), "--weight-cache", str(disk / "weights"))
        for _ in range(2):  # and again, over what the first one left
            with tampered("", "--model", f"m={model}", *caches) as server:
                assert server.port
                for index in range(4):
                    assert_serves(server, f"m.{index}", 1 + index)
                end(server)
        left = [path for path in (disk / "weights").rglob(".*") if path.is_file()]
        assert left == [], "parts of files are left on a disk that is full"


def test_a_file_that_grows_too_large_costs_the_caches_alone(tmp_path: Path) -> None:
    model = put(tmp_path / "m", 1)
    caches = ("--cache-dir", str(tmp_path / "plans"), "--weight-cache", str(tmp_path / "weights"))
    with tampered("", "--model", f"m={model}", *caches, limit=small_files) as server:
        assert server.port
        for index in range(4):
            assert_serves(server, f"m.{index}", 1 + index)
        end(server)
    assert [path for path in (tmp_path / "weights").rglob("*.safetensors*") if path.is_file()] == []


KILLED_IN_THE_CACHE = """
import os
from gemmwire_service.checkpoint.safetensors_writer import SafetensorsWriter
real = SafetensorsWriter.put
puts = []
def put(self, *arguments):
    real(self, *arguments)
    puts.append(1)
    if len(puts) == 7:
        os.kill(os.getpid(), 9)
SafetensorsWriter.put = put
"""


def test_a_server_that_is_killed_as_it_fills_its_cache_leaves_one_that_is_right(tmp_path: Path) -> None:
    """Guards: half a weight that the next start takes for a whole one."""
    model = put(tmp_path / "m", 1)
    cache = ("--weight-cache", str(tmp_path / "weights"))
    with tampered(KILLED_IN_THE_CACHE, "--model", f"m={model}", *cache) as server:
        assert server.process.wait(60) == -signal.SIGKILL
    assert list((tmp_path / "weights").rglob("*.safetensors")), "it was killed before it kept anything"
    for _ in range(2):
        with tampered("", "--model", f"m={model}", *cache) as server:
            assert server.port
            for index in range(4):
                assert_serves(server, f"m.{index}", 1 + index)
            end(server)


GONE_WHILE_READ = """
from gemmwire_service.checkpoint.safetensors_file import SafetensorsFile
real = SafetensorsFile.load
def load(self, name):
    if "gone" in str(self.path) and name.startswith("2"):
        self.path.unlink(missing_ok=True)
    return real(self, name)
SafetensorsFile.load = load
"""


def test_a_checkpoint_that_is_deleted_while_it_starts_ends_it_with_the_reason(tmp_path: Path) -> None:
    model = put(tmp_path / "gone", 1)
    with tampered(GONE_WHILE_READ, "--model", f"m={model}") as server:
        assert server.process.wait(60) == 1
    assert "no such file" in server.text
    assert "Traceback" not in server.text


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_changes_nothing(tmp_path: Path) -> None:
    """Guards: a model that is half there, or the loss of the one that was."""
    live, gone = put(tmp_path / "root" / "live", 1), put(tmp_path / "root" / "gone", 5)
    with tampered(GONE_WHILE_READ, "--model-root", str(live.parent)) as server:
        assert server.port
        assert load(server, "live")[0] == 200
        status, problem = load(server, "gone")
        assert (status, problem["code"]) == (400, "model_invalid")
        assert "no such file" in str(problem["error"])
        assert send(server, "/v2/models/gone.0/infer", raw(X), {HEADER_LENGTH: "0"})[0] == 404
        (gone / "model.safetensors").unlink(missing_ok=True)
        for index in range(4):
            assert_serves(server, f"live.{index}", 1 + index)
        end(server)


def test_memory_that_ends_while_a_model_is_loaded_changes_nothing(tmp_path: Path) -> None:
    """Guards: a server that is lost, or a model that is half there, because another one was too large."""
    live = put(tmp_path / "root" / "live", 1)
    big = live.parent / "big"
    big.mkdir()
    rows, columns = 16384, 8192  # 512 MiB, of which the file holds none
    header = frame({"w.weight": entry("F32", [rows, columns], 0, 4 * rows * columns)})
    with (big / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * rows * columns)
    with tampered("", "--model-root", str(live.parent)) as server:
        assert server.port
        assert load(server, "live")[0] == 200
        assert_serves(server, "live.0", 1)
        pid = server.process.pid
        used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
        for _ in range(3):
            status, problem = load(server, "big")
            assert status in (400, 500), problem
            assert problem["code"] in ("model_invalid", "device_failed")
            for index in range(4):
                assert_serves(server, f"live.{index}", 1 + index)
        until(lambda: server.process.poll() is None, "it ended")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
