"""The same layers behind the path from the socket, and behind ASGI alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmwire_service.connection import Connection
from gemmwire_service.layer import Layer
from gemmwire_service.repeat import Repeat
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


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Repeat]:
    """Requests that were known by their bytes."""
    found: list[Repeat] = []
    real = Connection._begin_again

    def noting(self: Connection, repeat: Repeat, layer: Layer, data: memoryview) -> None:
        found.append(repeat)
        real(self, repeat, layer, data)

    monkeypatch.setattr(Connection, "_begin_again", noting)
    return found
