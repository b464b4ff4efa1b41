"""A service started with docker-compose.yml as it is, on a free port."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from docker_host import Docker
from source_tree import ROOT

PROJECT = "gemmwire-test"


@dataclass(frozen=True)
class Container:
    """The running service: its container, its port on this machine, and how long it took to be healthy."""

    docker: Docker
    name: str
    port: int
    healthy_after: float

    def inside(self, *command: str, check: bool = True) -> str:
        """The output of a command in the container, as the service's user."""
        return self.docker.run("exec", self.name, *command, check=check)

    def state(self) -> dict[str, object]:
        found: dict[str, object] = self.docker.inspect(self.name)["State"]
        return found


@contextmanager
def composed(docker: Docker) -> Iterator[Container]:
    """`docker compose up` with no file edited, from the moment it is healthy."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    docker.environ["GEMMWIRE_PORT"] = str(port)
    project = ("--file", str(ROOT / "docker-compose.yml"), "--project-name", PROJECT)
    try:
        began = time.monotonic()
        docker.up(*project, "up", "--detach", "--no-build")
        name = docker.up(*project, "ps", "--quiet").strip()
        _until_healthy(docker, name)
        yield Container(docker, name, port, time.monotonic() - began)
    finally:
        docker.up(*project, "down", "--volumes", check=False)


def _until_healthy(docker: Docker, name: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while (state := docker.inspect(name)["State"])["Health"]["Status"] != "healthy":
        log = docker.run("logs", name)[-4000:]
        assert state["Running"], f"the service ended with {state['ExitCode']}:\n{log}"
        assert time.monotonic() < end, f"{state['Health']}\n{log}"
        time.sleep(0.2)
