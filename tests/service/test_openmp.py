"""How the threads of a matmul wait: said to libgomp before it is loaded, unless the user has said it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gemmwire_service.openmp import wait_shortly


def spins(**said: str) -> str:
    """What libgomp goes by in a process that is about to serve, as it says itself."""
    code = "from gemmwire_service.__main__ import COMMANDS; COMMANDS['serve'](); import torch"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environ |= {"OMP_DISPLAY_ENV": "verbose"} | said
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not found:
        pytest.skip("this torch computes with another OpenMP")
    return found[0].partition("'")[2].rstrip("'")


def test_libgomp_hears_of_it() -> None:
    """Guards: a setting that comes after torch has been imported, and is never read."""
    assert spins() == "1000"


def test_the_user_has_the_last_word() -> None:
    assert spins(GOMP_SPINCOUNT="77") == "77"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_either_of_the_users_variables_is_left_alone(name: str) -> None:
    environ = {name: "passive"}
    wait_shortly(environ)
    assert environ == {name: "passive"}
