"""The same layers behind the path from the socket, and behind ASGI alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serving import Served, serving, settings


@pytest.fixture(scope="module")
def fast(checkpoint: object) -> Iterator[Served]:
    with serving(settings(model=(f"m={checkpoint}",), random_layer=("tall=200000x32",))) as served:
        yield served


@pytest.fixture(scope="module")
def asgi(checkpoint: object) -> Iterator[Served]:
    options = settings(model=(f"m={checkpoint}",), random_layer=("tall=200000x32",), fast_path=False)
    with serving(options) as served:
        yield served
