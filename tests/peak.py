"""The memory that a piece of work takes, measured on a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20

measurable = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs Linux's /proc to measure memory"
)

STATUS = """
import sys

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024
"""


def measured(code: str, *arguments: str | Path) -> int:
    """The number in the last line that a process prints which runs `code`; STATUS begins such code."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    # glibc keeps freed blocks of up to 32 MiB for the next call, unless it is told where its own memory ends.
    fixed = {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **fixed}, timeout=100)
    assert run.returncode == 0, run.stderr
    return int(run.stdout.splitlines()[-1])
