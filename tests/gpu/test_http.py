"""The whole server on a GPU, over HTTP: models that come and go, and new weights, while clients ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from gemmwire import Client
from gemmwire.errors import GemmwireError
from on_gpu import REHEARSAL, sized
from oracle import assert_same_bits, reference, rounded_once, sparse

if TYPE_CHECKING:
    from serving import Served

pytestmark = pytest.mark.gpu
N, K = sized(512, 128), sized(768, 256)
ROWS = (1, 3, 16, 100)
TIMES = sized(12, 2)


def weight(seed: int) -> Tensor:
    return sparse(N, K, torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def x_of(m: int) -> Tensor:
    return sparse(m, K, torch.Generator().manual_seed(1000 + m)).to(torch.bfloat16)


def expected(m: int, seed: int) -> Tensor:
    return rounded_once(reference(x_of(m), weight(seed)))


@pytest.fixture
def server(device: torch.device, tmp_path: Path) -> Iterator[Served]:
    pytest.importorskip("fastapi", reason="the server's packages are not installed")
    save_file = pytest.importorskip("safetensors.torch").save_file
    from serving import serving, settings

    for model in ("a", "b"):
        folder = tmp_path / model
        folder.mkdir()
        save_file({"up.weight": weight(0)}, folder / "model.safetensors")
    options = settings(model_root=str(tmp_path), device=device.type, max_bucket=sized(256, 16))
    with serving(options) as served:
        yield served


def change(server: Served, verb: str, model: str) -> None:
    from http_calls import call

    reply = call(server, "POST", f"/v2/repository/models/{model}/{verb}", b"{}")
    assert reply.status == 200, reply.body


def assert_serves(client: Client, layer: str, seed: int) -> None:
    for m in ROWS:
        assert_same_bits(client.infer(layer, x_of(m)), expected(m, seed))


def test_models_come_and_go(server: Served, device: torch.device) -> None:
    """Guards: graphs and memory of a model that was unloaded, held or used by one that is loaded after it."""
    with Client(server.url) as client:
        change(server, "load", "a")
        assert_serves(client, "a.up", 0)
        held = []
        for _ in range(TIMES):
            change(server, "load", "b")
            assert_serves(client, "b.up", 0)
            change(server, "unload", "b")
            held.append(torch.cuda.memory_reserved() if device.type == "cuda" else 0)
            assert_serves(client, "a.up", 0)
        assert held[-1] <= held[1], f"device memory grows with every load: {held}"
        with pytest.raises(GemmwireError):
            client.infer("b.up", x_of(1))


def test_every_answer_is_that_of_the_version_it_names(server: Served) -> None:
    """Guards: an answer of half a refit, or of the graph of another version."""
    seeds = {1: 0}
    wrong: list[str] = []
    ended = threading.Event()
    answers = 0

    def ask() -> None:
        nonlocal answers
        with Client(server.url) as client:
            while not ended.is_set():
                for m in ROWS:
                    answer = client.call("a.up", x_of(m))
                    answers += 1
                    seed = int(answer.version) - 1  # as the refits below have it
                    if not torch.equal(answer.y, expected(m, seed)):
                        wrong.append(f"m={m}, version {answer.version}")

    with Client(server.url) as client:
        change(server, "load", "a")
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            for seed in range(1, TIMES + 1):
                seeds[int(client.refit("a.up", weight(seed)).version)] = seed
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)
    assert seeds == {seed + 1: seed for seed in range(TIMES + 1)}
    assert not wrong, f"{len(wrong)} of {answers}, first {wrong[0]}"
    assert answers or REHEARSAL
