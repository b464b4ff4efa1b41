"""gemmwire-serve as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

COMMAND = [sys.executable, "-m", "gemmwire_service"]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GEMMWIRE_")}
    return kept | {"PYTHONUNBUFFERED": "1"} | variables


def started(command: Sequence[str]) -> subprocess.Popen[str]:
    """With pipes for what it says, and no settings of the caller's."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """gemmwire-serve on a free port, from the moment it says ready -> (process, lines it printed)."""
    with started([*COMMAND, "--port", "0", *arguments]) as running:
        assert running.stdout is not None
        printed: list[str] = []
        try:
            for line in running.stdout:
                printed.append(line.rstrip("\n"))
                if " -c " in line:
                    break
            yield running, printed
        finally:
            if running.poll() is None:
                running.kill()


def fails(*arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment(**variables), timeout=60
    )
    return done.returncode, done.stderr
