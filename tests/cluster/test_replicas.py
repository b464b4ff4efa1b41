"""Two replicas of one checkpoint under Ray Serve: one URL, one answer, one version."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from exact_layer_versions import LAYER, X, checkpoint, expected, weight
from gemmwire import Answer, Client, Conflict, GatewayFailed, GemmwireError, Retries
from oracle import assert_same_bits, spread
from ray_cluster import Deployed, deployed
from serving import serving, settings, until

pytestmark = pytest.mark.ray

THREADS = 4
PATIENT = Retries(20, delay=0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(proxy: str, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("refits")
    with deployed(proxy, "pair", model=model, min_replicas="2", refit_dir=str(folder)) as running:
        yield running


class Load:
    """Threads that ask for the same until the block ends, and what came of it."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.errors: list[GemmwireError] = []
        self.done = threading.Event()

    def ask(self, url: str, retries: Retries | int) -> None:
        with Client(url, retries=retries, timeout=60) as client:
            while not self.done.is_set():
                try:
                    self.answers.append(client.call(LAYER, X.bfloat16()))
                except GemmwireError as error:
                    self.errors.append(error)
                    time.sleep(0.05)

    def more(self, count: int) -> None:
        """Wait for so many answers more."""
        until(partial_more(self.answers, len(self.answers) + count), "no more answers come", 60)


def partial_more(answers: list[Answer], count: int) -> Callable[[], bool]:
    return lambda: len(answers) >= count


@contextmanager
def load(url: str, retries: Retries | int = PATIENT) -> Iterator[Load]:
    load = Load()
    threads = [threading.Thread(target=load.ask, args=(url, retries)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        load.more(2 * THREADS)
        yield load
    finally:
        load.done.set()
        for thread in threads:
            thread.join(60)
    assert load.answers
    for answer in load.answers:
        assert_same_bits(answer.y, expected(int(answer.version)))


def test_both_answer_as_one_process_does(pair: Deployed, model: str) -> None:
    """Guards: replicas that differ from each other or from gemmwire-serve, in bits or in what they say."""
    rows = [spread(m, X.shape[1], seed=m).bfloat16() for m in (1, 2, 17, 300)]
    with serving(settings(model=(model,))) as served, Client(served.url) as alone:
        whole = [alone.infer(LAYER, x) for x in rows]
        layers = alone.layers()
    with Client(pair.url) as client:
        for _ in range(6):  # of which each replica gets some
            for x, y in zip(rows, whole, strict=True):
                assert torch.equal(client.infer(LAYER, x).view(torch.int16), y.view(torch.int16))
        assert client.layers() == layers
        assert client.ready()
    assert len(pair.pids()) == 2


def test_a_refit_under_load_is_honest_and_reaches_both(pair: Deployed) -> None:
    """Guards: an answer whose bits are of another version than it names; replicas that each count alone."""
    with load(pair.url) as running, Client(pair.url, retries=PATIENT) as client:
        first = int(client.layer(LAYER).version)
        for number in range(first + 1, first + 6):
            done = client.refit(LAYER, weight(number))
            assert done.version == str(number)
            for _ in range(4):
                asked = client.call(LAYER, X.bfloat16(), min_version=number)
                assert int(asked.version) >= number
                assert_same_bits(asked.y, expected(int(asked.version)))
        running.more(4 * THREADS)
    assert running.errors == []
    assert {int(answer.version) for answer in running.answers} >= {first, first + 5}
    with Client(pair.url) as client, pytest.raises(Conflict):
        client.refit(LAYER, weight(1), if_version=first)


def test_a_killed_replica_loses_what_it_held_and_comes_back_with_the_newest_weights(pair: Deployed) -> None:
    """Guards: a failure that clients see, or that brings the checkpoint's old weights back."""
    with Client(pair.url, retries=PATIENT) as client:
        current = int(client.layer(LAYER).version) + 1
        client.refit(LAYER, weight(current))
        for _ in range(8):
            client.infer(LAYER, X.bfloat16(), min_version=current)
    before = pair.pids()
    with load(pair.url) as patient, load(pair.url, retries=0) as plain:
        os.kill(before[0], signal.SIGKILL)
        plain.more(10 * THREADS)
        until(lambda: len(set(pair.pids()) - set(before)) == 1, "no replica came instead", 60)
        until(lambda: pair.running() == 2, "the new replica does not run", 60)
        patient.more(10 * THREADS)
    assert patient.errors == []
    assert all(isinstance(error, GatewayFailed) for error in plain.errors), plain.errors
    assert len(plain.errors) <= THREADS  # each of them had one request under way
    late = [int(answer.version) for answer in patient.answers[-10 * THREADS :]]
    assert set(late) == {current}


def test_a_model_that_is_not_there_fails_the_deployment_with_its_reason(proxy: str) -> None:
    """Guards: a deployment that starts for ever, with the reason in a log of some node."""
    from ray import serve

    try:
        with (
            pytest.raises(RuntimeError, match="bad failed"),
            deployed(proxy, "bad", model="none.safetensors"),
        ):
            pass
        status = serve.status().applications["bad"]
        assert "none.safetensors: no such file" in status.deployments["gemmwire"].message
    finally:
        serve.delete("bad")
