"""A Ray cluster of this one host, small, and applications on it: what the tests of Ray Serve run on.

Ray is imported inside functions: these files are also read where it is not installed.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import until

STORE_BYTES = 100 << 20
CPUS = (
    16  # that Ray counts: it starts a process for each replica, and the host shares its real ones among them
)


@dataclass(frozen=True)
class Deployed:
    """An application that answers at `url`."""

    url: str
    name: str

    def pids(self, deployment: str = "gemmwire") -> list[int]:
        """Of the processes of its replicas on this host."""
        title = f"ray::ServeReplica:{self.name}:{deployment}"
        return sorted(pid for pid, command in _processes() if command.startswith(title))

    def running(self, deployment: str = "gemmwire") -> int:
        """How many replicas Ray counts as running."""
        from ray import serve

        state = serve.status().applications[self.name].deployments[deployment]
        return int(state.replica_states.get("RUNNING", 0))


@contextmanager
def cluster() -> Iterator[str]:
    """-> the URL of its proxy. Nothing of it is left when the block ends.

    With RAY_SERVE_ENABLE_HA_PROXY=1 in the environment that is HAProxy, and the tests are the same.
    """
    with tempfile.TemporaryDirectory(prefix="gw-", ignore_cleanup_errors=True) as folder:
        yield from _cluster(folder)


def _cluster(folder: str) -> Iterator[str]:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),  # else Ray leaves one in the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Ray's own modules do while they are imported
        import ray
        from ray import serve
    port = _free_port()
    try:
        ray.init(
            address="local",
            num_cpus=CPUS,
            num_gpus=0,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()


@contextmanager
def deployed(url: str, name: str, **arguments: object) -> Iterator[Deployed]:
    """gemmwire with these arguments, as `serve run` takes them, from the moment its layers are loaded."""
    from ray import serve

    from gemmwire_service.ray import app

    given: dict[str, Any] = {"device": "cpu", **arguments}
    serve.run(app(given), name=name, route_prefix=f"/{name}")
    try:
        yield Deployed(f"{url}/{name}", name)
    finally:
        serve.delete(name)
        until(lambda: name not in serve.status().applications, f"{name} is still there")


def _processes() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
