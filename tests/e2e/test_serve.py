"""gemmwire-serve as a process: what it prints, how it fails, how it stops."""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gemmwire
from http_calls import HEADER_LENGTH, raw
from process import COMMAND, environment, fails, process, started

pytestmark = pytest.mark.e2e


def test_with_no_option_it_serves_a_real_model_and_the_printed_line_works() -> None:
    with process() as (running, printed):
        text = "\n".join(printed)
        assert "29 layers" in text
        assert re.search(r"demo\.blocks\.0\.ffn\.W2 +128 +341 +emulation +\d\.\d\d %", text)
        assert "ready on http://127.0.0.1:" in text
        # The line is meant for a shell in the folder where the server was started.
        answer = subprocess.run(
            shlex.split(printed[-1]),
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        assert answer.returncode == 0, answer.stderr
        assert "[[" in answer.stdout
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_it_stops_with_status_0(number: signal.Signals) -> None:
    with process("--random-layer", "r=8x64") as (running, _):
        running.send_signal(number)
        assert running.wait(30) == 0


def test_a_checkpoint_that_is_not_there_ends_it_with_status_1_and_the_reason() -> None:
    status, said = fails("--model", "m=/nowhere/model.safetensors", "--port", "0")
    assert status == 1
    assert "/nowhere/model.safetensors" in said
    assert "Traceback" not in said


def test_a_truncated_checkpoint_ends_it_with_status_1_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    status, said = fails("--model", f"m={path}", "--port", "0")
    assert status == 1
    assert str(path) in said
    assert "Traceback" not in said


def test_a_backend_that_cannot_run_here_is_refused_with_its_reason() -> None:
    status, said = fails("--backend", "flashinfer_trtllm", "--port", "0")
    assert status == 1
    assert "flashinfer_trtllm" in said
    assert "emulation" in said
    assert "Traceback" not in said


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = fails("--port", str(port))
    assert (status, f"127.0.0.1:{port}" in said, "Traceback" in said) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--prot", "1"], {}, "--prot"),
        (["--port", "x"], {}, "--port"),
        ([], {"GEMMWIRE_PROT": "1"}, "GEMMWIRE_PORT"),
        (["--device", "cuda", "--port", "0"], {"CUDA_VISIBLE_DEVICES": ""}, "--device cpu"),
    ],
    ids=["unknown-flag", "wrong-value", "unknown-variable", "no-cuda"],
)
def test_wrong_settings_end_it_with_status_2(
    arguments: list[str], variables: dict[str, str], named: str
) -> None:
    status, said = fails(*arguments, **variables)
    assert (status, named in said, "Traceback" in said) == (2, True, False), said


def test_an_installation_of_the_client_alone_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None; "
        "from gemmwire_service.__main__ import main; sys.exit(main([]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "gemmwire[service]" in done.stderr, "Traceback" in done.stderr) == (
        2,
        True,
        False,
    )


def test_a_client_with_a_half_sent_body_does_not_keep_it_alive() -> None:
    with process("--random-layer", "r=8x64") as (running, printed):
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", "\n".join(printed))[1])  # type: ignore[index]
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"POST /v2/models/r/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
            time.sleep(0.2)
            running.send_signal(signal.SIGTERM)
            assert running.wait(30) == 0


def test_a_signal_while_it_loads_ends_it_without_a_traceback(tmp_path: Path) -> None:
    """Loading takes longer than the wait for the port, which is bound before."""
    with started([*COMMAND, "--port", "0", "--random-layer", "r=8192x8192"]) as running:
        time.sleep(2.0)
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=60)
    assert "Traceback" not in said
    assert running.returncode in (0, -signal.SIGTERM), said


def test_it_answers_on_a_unix_socket_beside_the_port(tmp_path: Path) -> None:
    path = tmp_path / "gemmwire.sock"
    with process("--random-layer", "a=8x32", "--uds", str(path)) as (running, _):
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(20)
            link.connect(str(path))
            link.sendall(
                b"POST /v2/models/a/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 64\r\n"
                b"Inference-Header-Content-Length: 0\r\n\r\n" + bytes(64)
            )
            assert link.recv(65536).startswith(b"HTTP/1.1 200 OK")
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    assert not path.exists()


def test_it_serves_where_every_warning_is_an_error() -> None:
    """Guards: what a library only warns about today, such as a tensor over bytes that are read-only."""
    command = [sys.executable, "-W", "error", *COMMAND[1:], "--port", "0", "--device", "cpu"]
    with started([*command, "--random-layer", "r=8x64"]) as running:
        assert running.stdout is not None
        found = (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in running.stdout)
        try:
            port = int(next(match for match in found if match)[1])
            for body in (raw(torch.ones(3, 64, dtype=torch.bfloat16)), b""):
                link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
                link.request("POST", "/v2/models/r/infer", body, {HEADER_LENGTH: "0"})
                assert link.getresponse().status == 200
                link.close()
            running.send_signal(signal.SIGTERM)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
    assert (running.returncode, "Warning" in said) == (0, False), said


def unread() -> int:
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        pytest.param(unread, 141, "", id="nobody-reads"),
        pytest.param(
            lambda: os.open("/dev/full", os.O_WRONLY),
            2,
            "gemmwire-serve: standard output cannot be written to: No space left on device\n",
            id="full",
        ),
    ],
)
@pytest.mark.parametrize(
    "arguments", [("key", "me"), ("accuracy", "glassllm", "--layers", "*.W_K", "--rows", "1")]
)
def test_what_cannot_be_printed_has_a_status_of_its_own(
    output: Callable[[], int], status: int, said: str, arguments: tuple[str, ...]
) -> None:
    """Guards: a traceback, and the status 1 of `accuracy --fail-on` for a report that nobody could read."""
    with os.fdopen(output(), "wb") as writing:
        done = subprocess.run(
            [*COMMAND, *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=60,
        )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith(said)


def test_it_serves_though_nobody_reads_what_it_says(tmp_path: Path) -> None:
    """Guards: a traceback in the log of `gemmwire-serve | head -1`."""
    path = tmp_path / "a.sock"
    arguments = ["--port", "0", "--random-layer", "r=32x32", "--uds", str(path)]
    with (
        os.fdopen(unread(), "wb") as writing,
        subprocess.Popen(
            [*COMMAND, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, env=environment()
        ) as running,
    ):
        try:
            with gemmwire.Client(f"unix://{path}", retries=gemmwire.Retries(100, longest=0.5)) as client:
                assert client.infer("r", torch.ones(1, 32)).shape == (1, 32)
            running.send_signal(signal.SIGTERM)
            _, said = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 0, said
    assert "standard output cannot be written to: Broken pipe" in said
    assert "Traceback" not in said
