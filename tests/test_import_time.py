"""What an import brings with it, seen from a process that has imported nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
before = set(sys.modules)
import {module}
print(*sorted({{name.partition('.')[0] for name in set(sys.modules) - before}}))
"""


def brought_in_by(module: str) -> set[str]:
    """The top-level names that `import module` adds to sys.modules of a fresh interpreter."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["gemmwire", "gemmwire.wire", "gemmwire.client", "gemmwire.errors"], ids=lambda name: name
)
def test_the_client_is_light(module: str) -> None:
    """Guards: an SDK whose import costs seconds, or that needs what only the server has installed."""
    heavy = {"torch", "numpy", "ml_dtypes", "gemmwire_service", "fastapi", "pydantic", "uvicorn", "httpx"}
    assert brought_in_by(module) & heavy == set()


def test_the_health_check_is_standard_library_alone() -> None:
    """Guards: a process of torch's size every few seconds, killed by its limit before it has asked."""
    brought = brought_in_by("gemmwire_service.healthcheck")
    assert brought - sys.stdlib_module_names == {"gemmwire_service"}


def test_the_reader_sees_what_an_import_brings() -> None:
    """Guards: a set that is empty because the child process looked at nothing."""
    assert "json" in brought_in_by("json")
