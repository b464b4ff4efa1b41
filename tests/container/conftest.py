"""A docker, the image of the CPU, built once, and a service from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

import base_image
from composed import Container, composed
from docker_host import Docker, NoDocker, docker
from pip_settings import build_secrets
from source_tree import ROOT

IMAGE = "gemmwire:cpu"  # as docker-compose.yml calls it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Building takes minutes and gigabytes: only who asks for it gets it."""
    if "container" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="builds an image, which takes docker and minutes: ./dev test-container")
    for item in items:
        if item.get_closest_marker("container"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """A docker that has the base image."""
    try:
        with docker() as found:
            base_image.ensure(found, tmp_path_factory.mktemp("base"))
            yield found
    except NoDocker as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def image(engine: Docker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tag of the image, built twice: how long the second takes is what a change of a file costs."""
    with build_secrets(tmp_path_factory.mktemp("secrets")) as secrets:
        for what in ("with what was here", "again"):
            began = time.monotonic()
            # The network of this machine, whose index may be one that only it reaches.
            command = ["build", "--network", "host", *secrets, "--target", "cpu", "--tag", IMAGE, str(ROOT)]
            engine.run(*command, seconds=1800)
            print(f"built {what}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    return IMAGE


@pytest.fixture(scope="module")
def container(engine: Docker, image: str) -> Iterator[Container]:
    with composed(engine) as found:
        print(f"healthy after {found.healthy_after:.1f} s", file=sys.stderr)
        yield found
