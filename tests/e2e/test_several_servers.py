"""A client of two server processes, one of which ends under load: no answer is lost, and none is wrong."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gemmwire
from oracle import assert_same_bits, reference, rounded_once, sparse
from process import process
from serving import until

pytestmark = pytest.mark.e2e

N, K = 96, 512
TIMEOUT_S = 60.0


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHT = sparse(N, K, generator(1))
XS = [sparse(1 + 5 * (seed % 4), K, generator(100 + seed)).to(torch.bfloat16) for seed in range(24)]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """BF16 [m, N] of each of XS, in float64 before its one rounding."""
    return [rounded_once(reference(x, WEIGHT)) for x in XS]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    path = tmp_path / "model.safetensors"
    save_file({"l.weight": WEIGHT}, path)
    with ExitStack() as stack:
        found = []
        for _ in range(2):
            running, printed = stack.enter_context(process("--model", f"m={path}"))
            address = re.search(r"http://127\.0\.0\.1:\d+", "\n".join(printed))
            assert address is not None, printed
            found.append((address[0], running))
        yield found


class Load:
    """Calls are counted, and every answer is held to what it must be; the first error is kept."""

    def __init__(self, expected: list[Tensor]) -> None:
        self.expected = expected
        self.answers = 0
        self.stopped = False
        self.error: BaseException | None = None

    def check(self, index: int, y: Tensor) -> None:
        assert_same_bits(y, self.expected[index])
        self.answers += 1

    def until_more(self, answers: int) -> None:
        goal = self.answers + answers
        until(lambda: self.error or self.answers >= goal, f"no {answers} answers more", TIMEOUT_S)


def in_threads(urls: list[str], load: Load) -> None:
    """8 threads on one client, until the load is stopped."""

    def work(first: int) -> None:
        index = first
        try:
            while not load.stopped and load.error is None:
                index = (index + 1) % len(XS)
                load.check(index, client.infer("m.l", XS[index], timeout=TIMEOUT_S))
        except BaseException as error:
            load.error = error

    with gemmwire.Client(urls) as client:
        threads = [threading.Thread(target=work, args=(3 * number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def in_tasks(urls: list[str], load: Load) -> None:
    """16 tasks on one client, until the load is stopped."""

    async def work(client: gemmwire.AsyncClient, first: int) -> None:
        index = first
        while not load.stopped:
            index = (index + 1) % len(XS)
            load.check(index, await client.infer("m.l", XS[index], timeout=TIMEOUT_S))

    async def run() -> None:
        async with gemmwire.AsyncClient(urls) as client:
            await asyncio.gather(*(work(client, number) for number in range(16)))

    try:
        asyncio.run(run())
    except BaseException as error:
        load.error = error


@pytest.mark.parametrize(
    ("work", "number"),
    [
        pytest.param(in_threads, signal.SIGKILL, id="threads-killed"),
        pytest.param(in_tasks, signal.SIGKILL, id="tasks-killed"),
        pytest.param(in_threads, signal.SIGTERM, id="threads-draining"),
    ],
)
def test_no_call_is_lost_with_a_server(
    servers: list[tuple[str, subprocess.Popen[str]]],
    expected: list[Tensor],
    work: Callable[[list[str], Load], None],
    number: signal.Signals,
) -> None:
    """Guards: an answer of somebody else, or of half a request; a call that fails while a server works."""
    load = Load(expected)
    caller = threading.Thread(target=work, args=([url for url, _ in servers], load))
    caller.start()
    try:
        load.until_more(200)
        servers[0][1].send_signal(number)
        servers[0][1].wait(30)
        load.until_more(400)
    finally:
        load.stopped = True
        caller.join(TIMEOUT_S)
    assert load.error is None, repr(load.error)
    with gemmwire.Client(servers[1][0]) as survivor:
        assert survivor.stats("m.l")["inference_stats"]["success"]["count"] > 400
