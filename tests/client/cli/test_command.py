"""The command `gemmwire` against a server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gemmwire import Client
from gemmwire.cli import main
from oracle import spread
from scripted_layer import X, Y, layer
from scripted_server import Served as Scripted
from scripted_server import Session, answer, replying, serve
from serving import Served

Run = Callable[..., Any]


@pytest.fixture
def run(server: Served, capsys: pytest.CaptureFixture[str]) -> Run:
    """A command line without its URL -> what it printed, as JSON where it asks for that."""

    def call(command: str, *arguments: object) -> Any:
        status = main([command, server.url, *map(str, arguments)])
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        return json.loads(printed.out) if "--json" in arguments else printed.out

    return call


def failing(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(list(map(str, arguments))) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gemmwire: ")
    return printed.err


@pytest.fixture
def x() -> Any:
    return (spread(9, 33) / 64).numpy()


@pytest.fixture
def file(tmp_path: Path, x: Any) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, x)
    return path


def test_layers(run: Run) -> None:
    lines = run("layers").splitlines()
    assert lines[0].split() == ["layer", "N", "K", "bias", "version", "state", "backend"]
    assert ["m.ragged", "130", "33", "yes", "1", "READY", "emulation"] in [line.split() for line in lines]
    (entry,) = run("layers", "m.rag*", "--json")
    assert (entry["name"], entry["n"], entry["k"], entry["bias"]) == ("m.ragged", 130, 33, True)


def test_ping(run: Run) -> None:
    document = run("ping", "--json", "--count", 3)
    assert (document["name"], document["ready"]) == ("gemmwire", True)
    assert 0 < document["best_ms"] <= document["median_ms"]
    assert ", ready; a round trip takes" in run("ping")


def test_a_ping_of_a_server_that_is_not_ready_says_so_with_its_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards: a script that waits for a server and goes on too soon."""

    def script(session: Session, served: Scripted) -> None:
        while (request := session.request()) is not None:
            body = b'{"name": "s", "version": "1"}' if request.path == "/v2" else b""
            status = "503 Loading" if request.path.endswith("ready") else "200 OK"
            session.send(answer(body, status=status))

    with serve(script) as served:
        assert main(["ping", served.url]) == 1
    assert "not ready" in capsys.readouterr().out


def test_stats(run: Run, server: Served) -> None:
    with Client(server.url) as client:
        client.infer("m.plain", spread(3, 128))
    (entry,) = run("stats", "m.plain", "--json")
    assert entry["inference_stats"]["success"]["count"] >= 1
    head, line = run("stats", "m.plain").splitlines()
    assert head.split()[:3] == ["layer", "requests", "failed"]
    assert line.split()[0] == "m.plain"
    assert len(run("stats").splitlines()) == 1 + len(run("layers", "--json"))


@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("rows", [4096, 2])
@pytest.mark.parametrize("quantize", ["server", "client"])
def test_rows_of_a_file(
    run: Run, server: Served, x: Any, tmp_path: Path, suffix: str, rows: int, quantize: str
) -> None:
    """Guards: chunks that are lost or change places."""
    source, target = tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    shaped = x.reshape(3, 3, 33)
    if suffix == ".npy":
        np.save(source, shaped)
    else:
        save_file({"other": np.ones(3), "x": shaped}, source)
    arguments = ["-o", target, "--rows", rows, "--tensor", "x", "--quantize", quantize]
    document = run("infer", "m.ragged", source, "--json", *arguments)
    y = np.load(target) if suffix == ".npy" else load_file(target)["y"]
    with Client(server.url) as client:
        expected = [client.infer("m.ragged", x[start : start + rows]) for start in range(0, 9, rows)]
    assert y.shape == (3, 3, 130)
    assert np.array_equal(y.reshape(9, 130), np.concatenate(expected))
    assert (document["requests"], document["version"]) == (len(expected), "1")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_without_an_output_the_first_numbers_are_shown(run: Run, file: Path, x: Any, server: Served) -> None:
    with Client(server.url) as client:
        first = client.infer("m.ragged", x)[0]
    text = run("infer", "m.ragged", file)
    assert "y [9, 130] float32 of x [9, 33] float32, by emulation, version 1, in 1 request\n" in text
    assert f"y begins {first[0]:.6g}, {first[1]:.6g}" in text


def test_dtypes(run: Run, file: Path, x: Any, tmp_path: Path, server: Served) -> None:
    """Guards: float64, NumPy's default, as a dead end; bfloat16 that is read as two bytes of anything."""
    np.save(tmp_path / "x64.npy", x.astype(np.float64))
    np.save(tmp_path / "xb.npy", x.astype(ml_dtypes.bfloat16))
    run("infer", "m.ragged", tmp_path / "x64.npy", "--dtype", "BF16", "-o", tmp_path / "a.npy")
    run("infer", "m.ragged", tmp_path / "xb.npy", "-o", tmp_path / "b.npy")
    run("infer", "m.ragged", file, "--output-dtype", "BF16", "-o", tmp_path / "c.safetensors")
    with Client(server.url) as client:
        expected = client.infer("m.ragged", x.astype(ml_dtypes.bfloat16))
    for name in ("a.npy", "b.npy"):
        assert np.load(tmp_path / name).tobytes() == expected.tobytes()
    assert load_file(tmp_path / "c.safetensors")["y"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33), (33,)], ids=str)
def test_odd_shapes(run: Run, tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))
    run("infer", "m.ragged", tmp_path / "x.npy", "-o", tmp_path / "y.npy")
    assert np.load(tmp_path / "y.npy").shape == (*shape[:-1], 130)


def test_bench(run: Run) -> None:
    arguments = ("m.plain", "--rows", "1,3", "--seconds", 0.05, "--clients", 2)
    document = run("bench", *arguments, "--json")
    assert [entry["m"] for entry in document["measured"]] == [1, 3]
    for entry in document["measured"]:
        assert entry["requests_per_s"] > 0
        assert entry["rows_per_s"] == pytest.approx(entry["m"] * entry["requests_per_s"])
        assert 0 < entry["p50_us"] <= entry["p90_us"] <= entry["p99_us"]
    head, *lines = run("bench", *arguments, "--dtype", "BF16", "--quantize", "client").splitlines()
    assert head.split()[:2] == ["M", "clients"]
    assert len(lines) == 2


def test_what_goes_wrong_is_one_line(
    server: Served, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a traceback for a typing mistake."""
    assert "There is no layer" in failing(capsys, "infer", server.url, "m.nothing", file)
    assert "last dimension must be 128" in failing(capsys, "infer", server.url, "m.plain", file)
    assert "--rows is 0" in failing(capsys, "infer", server.url, "m.ragged", file, "--rows", 0)
    assert "no folder" in failing(capsys, "infer", server.url, "m.ragged", file, "-o", tmp_path / "a/y.npy")
    none = tmp_path / "none.npy"
    assert (
        failing(capsys, "infer", server.url, "m.ragged", none)
        == f"gemmwire: {none}: No such file or directory\n"
    )
    np.save(tmp_path / "x64.npy", np.zeros((1, 33)))
    assert "x is float64; --dtype FP32" in failing(
        capsys, "infer", server.url, "m.ragged", tmp_path / "x64.npy"
    )
    assert "whole numbers" in failing(capsys, "bench", server.url, "m.plain", "--rows", "1,x")
    assert "must start with" in failing(capsys, "layers", "127.0.0.1:8000")
    assert "with a colon" in failing(capsys, "layers", server.url, "--header", "x")
    assert "refused" in failing(capsys, "ping", "http://127.0.0.1:9", "--retries", 0)


def test_a_file_is_not_begun_before_it_is_known_to_be_possible(
    server: Served, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: minutes of work for an answer that goes nowhere, and an old file lost to a failure."""
    assert "has to end with" in failing(
        capsys, "infer", server.url, "m.ragged", file, "-o", tmp_path / "y.csv"
    )
    old = tmp_path / "y.npy"
    old.write_bytes(b"old")
    failing(capsys, "infer", server.url, "m.plain", file, "-o", old)
    assert old.read_bytes() == b"old"


def test_a_key_comes_from_a_file_and_headers_from_the_line(tmp_path: Path) -> None:
    """Guards: a secret in the list of processes."""
    (tmp_path / "key").write_text("k-123\n")
    with serve(replying(answer(b"[]"))) as served:
        assert (
            main(["layers", served.url, "--api-key-file", str(tmp_path / "key"), "--header", "X-A: b"]) == 0
        )
    (request,) = served.requests
    assert (request.headers["authorization"], request.headers["x-a"]) == ("Bearer k-123", "b")


def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a traceback for the wrong file."""
    (tmp_path / "key").write_bytes(b"\xff\xfe\x00")
    assert main(["ping", "http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key")]) == 1
    assert capsys.readouterr().err.startswith("gemmwire: api_key must be visible ASCII")


def test_chunks_are_of_one_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: rows of two weights in one file, after a refit in between."""
    np.save(tmp_path / "x.npy", X)
    with serve(layer) as served:
        arguments = ["a", str(tmp_path / "x.npy"), "--rows", "1", "-o", str(tmp_path / "y.npy")]
        assert main(["infer", served.url, *arguments]) == 0
    assert [request.path for request in served.requests] == [
        "/v2/models/a/infer",
        "/v2/models/a/versions/7/infer",
    ]
    assert np.array_equal(np.load(tmp_path / "y.npy"), Y)


def test_it_runs_as_a_program(server: Served) -> None:
    """Guards: an entry point that is not there, and a reader that closes the pipe."""
    command = [sys.executable, "-m", "gemmwire", "layers", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "m.ragged" in done.stdout
    usage = subprocess.run([sys.executable, "-m", "gemmwire"], capture_output=True, text=True, timeout=60)
    assert usage.returncode == 2


def test_url_adds_servers_that_share_the_calls(
    server: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path, file: Path
) -> None:
    with serve(layer) as other, serve(replying(answer(b"", "503 Service Unavailable"))) as loading:
        path = tmp_path / "x.npy"
        np.save(path, np.repeat(X, 8, 0))
        command = ["infer", other.url, "a", str(path), "--rows", "2", "--url", loading.url, "--json"]
        assert main(command) == 0
        document = json.loads(capsys.readouterr().out)
    assert (document["requests"], document["first"][:3]) == (8, Y[0].tolist())
    assert len(other.requests) == 8
    assert main(["ping", server.url, "--url", "http://127.0.0.1:9"]) == 0
    assert f"{server.url} http://127.0.0.1:9: gemmwire" in capsys.readouterr().out
    assert "make a client of each" in failing(capsys, "stats", server.url, "a", "--url", "http://h")
    assert "given twice" in failing(capsys, "layers", server.url, "--url", server.url)
