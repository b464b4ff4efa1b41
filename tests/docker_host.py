"""Docker on this machine: a client that builds with BuildKit, and a daemon, which root can start."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class NoDocker(Exception):
    """There is none here that can be used; the message says what is missing."""


@dataclass(frozen=True)
class Docker:
    """`docker` and its compose, as commands, and the variables to run them with."""

    client: str
    compose: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, check: bool = True, seconds: float = 60) -> str:
        """The output of `docker ARGUMENTS`."""
        return self._run([self.client, *arguments], check, seconds)

    def up(self, *arguments: str, check: bool = True, seconds: float = 120) -> str:
        """The output of `docker compose ARGUMENTS`."""
        return self._run([*self.compose, *arguments], check, seconds)

    def inspect(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("inspect", name))[0]
        return found

    def started(self) -> bool:
        return not self._answer([self.client, "info"])[0]

    def _run(self, command: list[str], check: bool, seconds: float) -> str:
        status, output = self._answer(command, seconds)
        assert not check or status == 0, f"{' '.join(command)} ended with {status}:\n{output[-4000:]}"
        return output

    def _answer(self, command: list[str], seconds: float = 60) -> tuple[int, str]:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.environ},
            timeout=seconds,
        )
        return done.returncode, done.stdout


@contextmanager
def docker() -> Iterator[Docker]:
    """A daemon that answers: this machine's own, or for root one that lives as long as the block.

    Errors: NoDocker.
    """
    client = _client()
    found = Docker(client, _compose(client), {"DOCKER_BUILDKIT": "1"})
    if found.started():
        yield found
        return
    if not shutil.which("dockerd") or os.geteuid():
        raise NoDocker("no Docker daemon answers, and only root can start one, where there is dockerd")
    with _daemon() as socket:
        yield Docker(found.client, found.compose, {**found.environ, "DOCKER_HOST": f"unix://{socket}"})


def _client() -> str:
    """The first docker in PATH that builds with BuildKit: one with buildx, or old enough to need none."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    clients = [found for folder in folders if (found := shutil.which("docker", path=folder))]
    if not clients:
        raise NoDocker("there is no docker in PATH")
    for client in clients:
        version = subprocess.run([client, "--version"], capture_output=True, text=True).stdout
        major = re.search(r"version (\d+)\.", version)
        with_buildx = subprocess.run([client, "buildx", "version"], capture_output=True).returncode == 0
        if with_buildx or (major is not None and int(major[1]) < 23):
            return client
    raise NoDocker(f"{clients[0]} lacks buildx, without which it cannot build")


def _compose(client: str) -> tuple[str, ...]:
    if subprocess.run([client, "compose", "version"], capture_output=True).returncode == 0:
        return (client, "compose")
    if found := shutil.which("docker-compose"):
        return (found,)
    raise NoDocker("there is neither docker compose nor docker-compose")


@contextmanager
def _daemon() -> Iterator[Path]:
    """dockerd with a folder of its own -> its socket. What it built goes with it; the bridge docker0 and its
    rules in iptables stay, as any dockerd leaves them."""
    folder = Path(tempfile.mkdtemp(prefix="docker-"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # its own default can be above what is allowed here
    command = ["dockerd", "--default-ulimit", f"nofile={files}:{files}", "--host", f"unix://{folder}/socket"]
    command += [
        "--data-root",
        f"{folder}/data",
        "--exec-root",
        f"{folder}/exec",
        "--pidfile",
        f"{folder}/pid",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            end = time.monotonic() + 60
            while "API listen on" not in (folder / "log").read_text():
                if running.poll() is not None or time.monotonic() > end:
                    last = (folder / "log").read_text().splitlines()[-1:]
                    raise NoDocker(f"dockerd does not start: {' '.join(last)}")
                time.sleep(0.1)
            yield folder / "socket"
        finally:
            running.terminate()
            running.wait(60)
            shutil.rmtree(folder, ignore_errors=True)
