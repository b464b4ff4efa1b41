"""Replicas that come with load and go without it, and what clients notice of that: nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gemmwire import Client, GemmwireError, Retries
from ray_cluster import deployed
from serving import until

pytestmark = pytest.mark.ray

M, N, K = 256, 1024, 1024
PATIENT = Retries(20, delay=0.05)


def test_replicas_follow_the_load_and_no_call_fails(proxy: str) -> None:
    """Guards: requests that a new replica gets before its layers are there, or an old one as it ends."""
    errors: list[GemmwireError] = []
    heavy, stop = threading.Event(), threading.Event()
    x = np.ones((M, K), np.float32)

    def ask(url: str, always: bool) -> None:
        with Client(url, retries=PATIENT) as client:
            while not stop.is_set():
                try:
                    if always or heavy.is_set():
                        client.infer("r", x)
                except GemmwireError as error:
                    errors.append(error)
                stop.wait(0.2 if always else 0)

    with deployed(
        proxy,
        "scaling",
        random_layer=f"r={N}x{K}",
        max_replicas=2,
        target_ongoing_requests=1,
        upscale_delay_s=1,
        downscale_delay_s=2,
    ) as running:
        threads = [threading.Thread(target=ask, args=(running.url, index == 0)) for index in range(6)]
        for thread in threads:
            thread.start()
        try:
            assert running.running() == 1
            heavy.set()
            until(lambda: running.running() == 2, "load brought no replica", 60)
            heavy.clear()
            until(lambda: running.running() == 1, "no replica left", 60)
            until(lambda: len(running.pids()) == 1, "its process did not end", 60)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert errors == []
