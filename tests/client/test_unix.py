"""A server's Unix socket as the address of a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import gemmwire
from serving import Served, serving, settings

X = np.full((3, 32), 0.5, np.float32)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    path = tmp_path_factory.mktemp("unix") / "a socket"
    with serving(settings(random_layer=("try=16x32",), uds=str(path))) as served:
        yield served, "unix://" + str(path).replace(" ", "%20")


def test_calls_go_through_the_socket(address: tuple[Served, str]) -> None:
    served, url = address
    with gemmwire.Client(served.url) as client:
        expected = client.infer("try", X)
    with gemmwire.Client(url) as client:
        assert client.url == url
        for _ in range(2):  # the second goes by the connection of the first
            np.testing.assert_array_equal(client.infer("try", X), expected)
        assert client.server().name == "gemmwire"
        many = client.infer_many([("try", X)] * 5, at_once=2)
    for y in many:
        np.testing.assert_array_equal(y, expected)


def test_tasks_go_through_the_socket(address: tuple[Served, str]) -> None:
    served, url = address

    async def calls() -> list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        async with gemmwire.AsyncClient(url) as client:
            return list(await asyncio.gather(*(client.infer("try", X) for _ in range(5))))

    with gemmwire.Client(served.url) as client:
        expected = client.infer("try", X)
    for y in asyncio.run(calls()):
        np.testing.assert_array_equal(y, expected)


def test_a_socket_that_nobody_made_is_named(tmp_path: Path) -> None:
    """Guards: "localhost" in the message of a server that was never asked by TCP."""
    path = tmp_path / "nobody"
    with gemmwire.Client(f"unix://{path}", retries=0) as client:
        with pytest.raises(gemmwire.ConnectionFailed, match=str(path)) as caught:
            client.live()
        assert "no such socket" in str(caught.value)


def test_a_path_that_no_socket_can_have_is_an_error_of_the_tree(tmp_path: Path) -> None:
    """Guards: an OSError of another kind, or a bare one, from a path of more than 107 bytes."""
    path = "/" + "a" * 200
    with gemmwire.Client(f"unix://{path}", retries=0) as client, pytest.raises(gemmwire.ConnectionFailed):
        client.live()

    async def call() -> None:
        async with gemmwire.AsyncClient(f"unix://{path}", retries=0) as client:
            await client.live()

    with pytest.raises(gemmwire.ConnectionFailed):
        asyncio.run(call())
