"""The image that the Dockerfile starts from: what is here, what is published, or one of Debian's packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docker_host import Docker
from source_tree import ROOT

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"


def base_image() -> str:
    """The name that the Dockerfile has for it."""
    found = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert found, "the Dockerfile names its base image in ARG PYTHON_IMAGE"
    return found[1]


def ensure(docker: Docker, folder: Path) -> None:
    """Have the base image under its name; skips where it can neither be pulled nor made."""
    name = base_image()
    here = docker.run("images", "--quiet", name)
    if here.strip():
        return
    said = docker.run("pull", "--quiet", name, check=False, seconds=300)
    if docker.run("images", "--quiet", name).strip():
        return
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip(f"{name} cannot be pulled, and only root can make it, with debootstrap: {said.strip()}")
    make(docker, name, folder / "root")


def make(docker: Docker, name: str, root: Path) -> None:
    """A stand-in for the published image: Debian's Python of that version, where that has its own."""
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    version = re.search(r"python:(\d+\.\d+)", name)
    assert version, f"{name} names no version of Python"
    for link in ("python", "python3"):
        (root / "usr" / "local" / "bin" / link).symlink_to(f"../../bin/python{version[1]}")
    archive = root.with_suffix(".tar")
    excluded = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
    subprocess.run(["tar", "-C", str(root), *excluded, "-cf", str(archive), "."], check=True)
    docker.run("import", str(archive), name, seconds=300)
    shutil.rmtree(root)
    archive.unlink()
