"""The one cluster of the run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from ray_cluster import cluster


@pytest.fixture(scope="session", autouse=True)
def _ray() -> None:
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed: ./dev test-ray")


@pytest.fixture(scope="session")
def proxy(_ray: None) -> Iterator[str]:
    """The URL of Ray's proxy."""
    with cluster() as url:
        yield url
