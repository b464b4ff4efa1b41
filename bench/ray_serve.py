"""What Ray Serve costs a request: one replica behind Ray's proxy, its HAProxy mode and a partition's ingress.

    ./dev bench ray_serve            # in .venv-ray, as ./dev test-ray

Beside gemmwire-serve itself, asked directly. The same layer, computed by the same emulation on one thread, is
asked by the SDK: by one caller for the latency, by eight for the rate. Each way is a process of its own, one
after the other, `--rounds` times; the medians are shown. Also the first request of each start, which tells
whether a proxy says that it is ready before it is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gemmwire import Client, GemmwireError

N, K = 1024, 1024
ROWS = (1, 256)
CALLERS = 8
WARM, SAMPLES, RATE_S = 30, 300, 3.0
WAYS = {
    "direct": "gemmwire-serve",
    "proxy": "Ray Serve, its proxy",
    "haproxy": "Ray Serve, HAProxy mode",
    "partition": "Ray Serve, its proxy and the ingress of a partition",
}


@contextmanager
def direct() -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "gemmwire_service",
        "--port",
        "0",
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
    ]
    command += ["--random-layer", f"r={N}x{K}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield next(found[1] for line in running.stdout if (found := re.search(r"ready on (\S+)", line)))
        finally:
            running.terminate()


@contextmanager
def under_ray(**arguments: object) -> Iterator[str]:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 32, "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve

    from gemmwire_service.ray import app

    layers = f"r={N}x{K}" + (",other=64x64" if "parts" in arguments else "")
    with tempfile.TemporaryDirectory(prefix="gw-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=8,
            num_gpus=0,
            object_store_memory=200 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": 18790})
            serve.run(app({"random_layer": layers, "device": "cpu", **arguments}), route_prefix="/")
            yield "http://127.0.0.1:18790"
        finally:
            serve.shutdown()
            ray.shutdown()


@contextmanager
def behind_haproxy() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        os.environ |= {
            "RAY_SERVE_ENABLE_HA_PROXY": "1",
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        }
        with under_ray() as url:
            yield url


START: dict[str, Callable[[], object]] = {
    "direct": direct,
    "proxy": under_ray,
    "haproxy": behind_haproxy,
    "partition": lambda: under_ray(placement="partition", parts=2),
}


def measure(url: str) -> dict[str, object]:
    found: dict[str, object] = {}
    with Client(url, retries=0) as client:
        try:
            client.infer("r", torch.ones(1, K))
            found["first"] = "answered"
        except GemmwireError as error:
            found["first"] = f"{type(error).__name__}: {error}"[:100]
    with Client(url, retries=20) as client:
        for m in ROWS:
            x = torch.randn(m, K).bfloat16()
            for _ in range(WARM):
                client.infer("r", x)
            times = []
            for _ in range(SAMPLES):
                began = time.perf_counter()
                client.infer("r", x)
                times.append(time.perf_counter() - began)
            cuts = statistics.quantiles(times, n=100)
            found[f"p50 {m}"], found[f"p99 {m}"] = 1e3 * cuts[49], 1e3 * cuts[98]
            found[f"rate {m}"] = rate(client, x)
    return found


def rate(client: Client, x: torch.Tensor) -> float:
    """Answers a second to CALLERS at once."""
    counts = [0] * CALLERS
    end = time.monotonic() + RATE_S

    def ask(index: int) -> None:
        while time.monotonic() < end:
            client.infer("r", x)
            counts[index] += 1

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / RATE_S


def one(way: str) -> None:
    with START[way]() as url:  # type: ignore[attr-defined]
        print(json.dumps(measure(url)), flush=True)


def show(results: dict[str, list[dict[str, object]]]) -> None:
    columns = [f"{what} {m}" for m in ROWS for what in ("p50", "p99", "rate")]
    print("| way | " + " | ".join(f"{each.replace(' ', ', M=')}" for each in columns) + " | first request |")
    print("| --- |" + " ---: |" * len(columns) + " --- |")
    for way, found in results.items():
        numbers = [statistics.median(float(str(each[column])) for each in found) for column in columns]
        shown = [
            f"{number:.0f}/s" if "rate" in name else f"{number:.2f} ms"
            for name, number in zip(columns, numbers, strict=True)
        ]
        lost = [each["first"] for each in found if each["first"] != "answered"]
        first = (
            f"{len(lost)} of {len(found)} lost: {lost[0]}"
            if lost
            else f"answered, {len(found)} of {len(found)}"
        )
        print(f"| {WAYS[way]} | " + " | ".join(shown) + f" | {first} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(WAYS), help="ways, with commas")
    parser.add_argument("--one", choices=list(WAYS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        return one(given.one)
    results: dict[str, list[dict[str, object]]] = {way: [] for way in given.only.split(",")}
    for _ in range(given.rounds):
        for way, found in results.items():
            command = [sys.executable, __file__, "--one", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    return show(results)


if __name__ == "__main__":
    main()
