"""A device that fails at one forward and goes on: who hears of it, and who does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gemmwire_service.backends.emulation import Emulation
from http_calls import Reply, call, infer, message
from links import held
from oracle import assert_rows_close, reference, spread
from serving import Served, serving, settings, until

FAULT = 512.0  # at which the first element of a row makes the forward fail


@pytest.fixture(params=(True, False), ids=("fast-path", "asgi"))
def served(
    checkpoint: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    real = Emulation.forward

    def forward(self: Emulation, x: Tensor, *arguments: Any) -> None:
        if (x[:, 0] == FAULT).any():
            raise RuntimeError("an illegal instruction was encountered")
        real(self, x, *arguments)

    with serving(settings(model=(f"m={checkpoint}",), fast_path=request.param)) as running:
        monkeypatch.setattr(Emulation, "forward", forward)
        yield running


def rows(k: int, first: float) -> Tensor:
    x = spread(2, k, seed=3) / 64
    x[0, 0] = first
    return x


def test_a_fault_in_mid_batch_is_the_answer_of_that_batch_alone(
    served: Served, weights: dict[str, Tensor]
) -> None:
    """Guards: a batch without answers, one failure that is everybody's, a server that fails from then on."""
    layers = ["plain"] * 4 + ["wide"] * 2
    with ThreadPoolExecutor(len(layers)) as pool:
        with held(served):
            firsts = [FAULT] + [1.0] * (len(layers) - 1)
            asked = [
                pool.submit(ask, served, layer, first) for layer, first in zip(layers, firsts, strict=True)
            ]
            until(lambda: served.engine.waiting == len(layers), "the requests did not arrive")
        replies = [each.result() for each in asked]
    assert [reply.status for reply in replies] == [500] * 4 + [200] * 2
    for reply in replies[:4]:
        assert reply.json["code"] == "device_failed"
        assert "illegal instruction" not in reply.json["error"], "the log's, not the client's"
    assert call(served, "GET", "/v2/health/ready").status == 200
    x = rows(128, 1.0)
    again = infer(served, "m.plain", *message(x))
    assert_rows_close(again.tensor, reference(x, weights["plain.weight"]))
    assert (served.engine.waiting, served.engine.held.total) == (0, 0)


def test_faults_one_after_the_other_leave_nothing_behind(served: Served) -> None:
    """Guards: a buffer, a place in the queue or a thread that each failure keeps."""
    threads = threading.active_count()
    for number in range(50):
        first = FAULT if number % 2 else 1.0
        assert ask(served, "plain", first).status == (500 if number % 2 else 200)
    assert (served.engine.waiting, served.engine.held.total) == (0, 0)
    assert threading.active_count() <= threads + 1


def ask(served: Served, layer: str, first: float) -> Reply:
    return infer(served, f"m.{layer}", *message(rows({"plain": 128, "wide": 512}[layer], first)))
