"""gemmwire-serve as a process of its own, and what the system says about it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from soaking.exact import MODEL, write_models
from soaking.malformed import STALL_S

STOP_S = 60
OPTIONS = ("--port", "0", "--device", "cpu", "--stall-s", str(STALL_S), "--log-level", "warning")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Server:
    """`status`: of the process, once it has ended."""

    pid: int
    port: int
    log: IO[bytes]
    status: int | None = None

    def faults(self) -> list[str]:
        """The last line of each traceback in the log."""
        self.log.seek(0)
        text = self.log.read().decode(errors="replace")
        return re.findall(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.*)", text)


@dataclass(frozen=True)
class Process:
    """Bytes of resident memory, in all and by what is behind it, and counts."""

    rss: int
    anon: int
    file: int
    threads: int
    fds: int


@contextmanager
def server() -> Iterator[Server]:
    """From the moment it is ready; stopped by SIGTERM."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GEMMWIRE_")}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        root = Path(folder)
        write_models(root)
        command = [sys.executable, "-m", "gemmwire_service", *OPTIONS, "--cache-dir", str(root / "cache")]
        command += ["--model-root", folder, "--model", f"{MODEL}={root / MODEL}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=kept) as running:
            found = None
            try:
                found = Server(running.pid, port(running), log)
                yield found
            finally:
                running.terminate()
                try:
                    status = running.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    running.kill()
                    status = running.wait()
                if found is not None:
                    found.status = status


def port(running: subprocess.Popen[str]) -> int:
    assert running.stdout is not None
    for line in running.stdout:
        if found := re.search(r"ready on \S+:(\d+)", line):
            return int(found[1])
    raise RuntimeError(f"the server ended with status {running.wait()}")


def look(pid: int) -> Process:
    text = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"(\w+):\s+(\d+)", text)}
    rss, anon = numbers["VmRSS"] << 10, numbers.get("RssAnon", 0) << 10
    file = (numbers.get("RssFile", 0) + numbers.get("RssShmem", 0)) << 10
    return Process(rss, anon, file, numbers["Threads"], len(os.listdir(f"/proc/{pid}/fd")))


def busy(*pids: int) -> tuple[float, float]:
    """Seconds of CPU time since the start: of all cores, and of these processes."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    own = sum(sum(map(int, _fields(pid)[11:13])) for pid in pids)
    return (user + nice + system + sum(more[:2])) / TICKS, own / TICKS


def _fields(pid: int) -> list[str]:
    """Those behind the name, which may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
