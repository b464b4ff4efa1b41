"""The nginx example in front of two servers: the same bits, limits and errors, also when one is killed."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gemmwire
from gemmwire import Client
from http_calls import message
from nginx import CONF, binary, configured, nginx
from oracle import assert_same_bits, reference, rounded_once, sparse
from process import process
from serving import Served, serving, settings, until

K = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nginx")


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Served]]:
    binary()
    with ExitStack() as stack:
        options = ({"random_layer": ("r=96x512",), "uds": str(folder / f"{name}.sock")} for name in range(2))
        yield [stack.enter_context(serving(settings(**each, max_body_bytes=32 << 20))) for each in options]


@pytest.fixture(scope="module")
def url(folder: Path, servers: list[Served]) -> Iterator[str]:
    with nginx(folder) as found:
        yield found


def answered(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any, Any]:
    """-> status, headers, JSON."""
    link = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        link.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = link.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        link.close()


def counts(servers: list[Served]) -> list[int]:
    found = []
    for served in servers:
        with Client(served.url) as client:
            found.append(client.stats("r")["inference_stats"]["success"]["count"])
    return found


@pytest.mark.parametrize("rows", [1, 33, 8192], ids=["2-KiB", "66-KiB", "16-MiB"])
def test_the_same_bits_come_through_it(servers: list[Served], url: str, folder: Path, rows: int) -> None:
    """Guards: a body that is cut, and one that goes by way of a file."""
    x = np.random.default_rng(rows).standard_normal((rows, K), dtype=np.float32)
    with Client(servers[0].url) as one:
        expected = one.infer("r", x)
    with Client(url) as client:
        for _ in range(4):
            assert np.array_equal(client.infer("r", x), expected)
    kept = [
        path for name in ("client_body", "proxy") for path in (folder / name).rglob("*") if path.is_file()
    ]
    assert kept == []


def test_both_servers_work(servers: list[Served], url: str) -> None:
    before = counts(servers)
    x = np.ones((3, K), np.float32)
    with Client(url) as client:
        client.infer_many([("r", x)] * 40)
        with pytest.raises(gemmwire.BadRequest) as caught:
            client.infer("r", x[:, 1:])
        assert caught.value.expected == K
    worked = [after - first for first, after in zip(before, counts(servers), strict=True)]
    assert sum(worked) == 40
    assert min(worked) > 0


def test_limits_are_the_servers(url: str) -> None:
    """Guards: a page of HTML where the server would have said what it takes."""
    with Client(url, retries=0) as client, pytest.raises(gemmwire.TooLarge) as caught:
        client.infer("r", np.zeros((33 << 20 >> 11, K), np.float32))
    assert (caught.value.code, caught.value.expected) == ("body_too_large", f"<= {32 << 20}")
    body, length = message(torch.ones(1, K))
    name = {"Inference_Header_Content_Length": str(length)}
    status, _, _ = answered(url, "GET", "/v2", x_long="a" * 60_000)
    assert status == 200
    status, _, said = answered(url, "POST", "/v2/models/r/infer", body, x_long="a" * 70_000, **name)
    assert (status, said["code"]) == (431, "head_too_large")


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/v2/systemsharedmemory/status", "/v2/cudasharedmemory", "/v2/repository/models/r/load"],
)
def test_what_concerns_one_server_is_refused_with_the_way_out(url: str, path: str) -> None:
    status, _, said = answered(url, "POST", path)
    assert (status, said["code"]) == (404, "route_unknown")
    assert re.search(r"\b(own|one|each)\b", said["error"])


def test_where_no_server_answers_it_is_a_503_that_every_client_understands(tmp_path: Path) -> None:
    """Guards: a 502 of HTML, which most clients do not send again."""
    binary()
    with nginx(tmp_path) as url:
        for _ in range(2):  # nobody listens; then both are set aside
            status, headers, said = answered(url, "POST", "/v2/models/r/infer", b"x")
            assert (status, headers["retry-after"], said["code"]) == (503, "1", "unavailable")
        with Client(url, retries=0) as client, pytest.raises(gemmwire.Overloaded) as caught:
            client.infer("r", np.ones((1, K), np.float32))
        assert caught.value.retry_after == 1.0


def test_the_example_is_valid_as_it_stands(tmp_path: Path) -> None:
    """Guards: a directive that nginx does not know, in the file and not in its copy for the tests."""
    path = configured(tmp_path, 8000)
    (tmp_path / "gemmwire.conf").write_text(CONF.read_text())
    done = subprocess.run(
        [binary(), "-t", "-p", str(tmp_path), "-c", str(path)], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, "warn" in done.stderr) == (0, False), done.stderr


@pytest.mark.e2e
def test_no_call_is_lost_with_a_server(tmp_path: Path) -> None:
    """Guards: half an answer, and a call that nobody sends again."""
    binary()
    weight = sparse(96, K, torch.Generator().manual_seed(1))
    save_file({"l.weight": weight}, tmp_path / "model.safetensors")
    xs = [sparse(1 + i, K, torch.Generator().manual_seed(9 + i)).to(torch.bfloat16) for i in range(9)]
    expected = [rounded_once(reference(x, weight)) for x in xs]
    errors: list[BaseException] = []
    answers: list[int] = []
    stop = threading.Event()

    def work(client: Client, index: int) -> None:
        try:
            while not (stop.is_set() or errors):
                index = (index + 1) % len(xs)
                assert_same_bits(client.infer("m.l", xs[index]), expected[index])
                answers.append(index)
        except BaseException as error:
            errors.append(error)

    def until_more(count: int) -> None:
        goal = len(answers) + count
        until(lambda: errors or len(answers) >= goal, f"no {count} answers more", 60)

    with ExitStack() as stack:
        model = ("--model", f"m={tmp_path / 'model.safetensors'}")
        running = [
            stack.enter_context(process(*model, "--uds", str(tmp_path / f"{name}.sock")))[0]
            for name in range(2)
        ]
        client = stack.enter_context(Client(stack.enter_context(nginx(tmp_path)), retries=5))
        threads = [threading.Thread(target=work, args=(client, index)) for index in range(8)]
        for thread in threads:
            thread.start()
        try:
            until_more(200)
            running[0].kill()
            until_more(300)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert errors == []
