"""The client for an event loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from typing import Any

import numpy as np
import pytest
import torch

import gemmwire
from gemmwire import AsyncClient, Client, ConnectionFailed, InvalidArgument, RefitIncomplete
from gemmwire.async_transport import AsyncHTTPTransport
from gemmwire.http1 import Request
from gemmwire.url import parse_url
from scripted_layer import B, K, W, X, Y, layer
from scripted_server import Served, Session, answer, replying, serve, waiting
from serving import Served as Service


def test_it_has_the_methods_of_client() -> None:
    """Guards: a call that one of the two clients lacks, or names otherwise. Shared memory is for threads."""

    def signatures(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    theirs_alone = set(signatures(Client)) - set(signatures(AsyncClient))
    assert theirs_alone == {"shared"}
    common = {name: names for name, names in signatures(Client).items() if name not in theirs_alone}
    assert signatures(AsyncClient) == common
    ours, theirs = (list(inspect.signature(kind).parameters) for kind in (AsyncClient, Client))
    assert ours == theirs


def test_infer_over_a_socket() -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            assert (await client.infer("a", X)).tolist() == Y.tolist()
            answer = await client.call("a", torch.tensor(X).bfloat16(), request_id="seven")
            assert torch.equal(answer.y, torch.tensor(Y).bfloat16())
            assert (answer.request_id, answer.version) == ("seven", "7")

    with serve(layer) as served:
        asyncio.run(run(served.url))
    assert served.connections == 1


def test_tasks_on_one_client_get_their_own_answers() -> None:
    """Guards: answers that change places between 64 tasks that share 8 connections."""

    async def work(client: AsyncClient, number: int) -> None:
        for turn in range(10):
            x = np.full((1 + turn, K), number * 64 + turn, np.float32)
            got = await client.call("a", x, request_id=f"{number}/{turn}")
            assert got.request_id == f"{number}/{turn}"
            assert np.array_equal(got.y, x @ W.T + B)

    async def run(url: str) -> None:
        async with AsyncClient(url, max_connections=8) as client:
            await asyncio.gather(*(work(client, number) for number in range(64)))

    with serve(layer) as served:
        asyncio.run(run(served.url))
    assert served.connections <= 8


def test_the_service_answers_both_clients_alike(server: Service) -> None:
    """Guards: a client that works with a scripted server only."""

    async def run(x: torch.Tensor) -> Any:
        async with AsyncClient(server.url) as client:
            layers = await client.layers()
            assert (await client.layer("m.ragged")).n == 130
            assert await client.live()
            assert await client.ready()
            assert (await client.server()).name == "gemmwire"
            assert (await client.stats("m.ragged"))["name"] == "m.ragged"
            return layers, await client.infer("m.ragged", x)

    x = torch.arange(99, dtype=torch.float32).view(3, 33)
    layers, y = asyncio.run(run(x))
    with Client(server.url) as client:
        assert torch.equal(client.infer("m.ragged", x), y)
        assert client.layers() == layers


def test_a_cancelled_task_gives_up_its_connection() -> None:
    """Guards: the answer to a call that was given up, read by the next one as its own."""
    came, go_on = threading.Event(), threading.Event()

    def script(session: Session, served: Served) -> None:
        number = served.connections
        while session.request() is not None:
            came.set()
            if number == 1:
                go_on.wait(20)
            session.send(answer(json.dumps({"name": str(number), "version": "1"}).encode()))

    async def run(url: str) -> str:
        async with AsyncClient(url, max_connections=1) as client:
            task = asyncio.ensure_future(client.server())
            await asyncio.to_thread(came.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            return (await client.server()).name

    with serve(script) as served:
        assert asyncio.run(run(served.url)) == "2"


def test_a_task_that_is_cancelled_in_the_line_leaves_it() -> None:
    """Guards: a slot that is given to a task which is gone, so that the next waits for ever."""
    came, go_on = threading.Event(), threading.Event()
    script = waiting(came, go_on, answer(b'{"name": "s", "version": "1"}'))

    async def run(url: str) -> None:
        async with AsyncClient(url, max_connections=1, timeout=20) as client:
            tasks = [asyncio.ensure_future(client.server()) for _ in range(4)]
            await asyncio.to_thread(came.wait, 20)
            tasks[1].cancel()
            tasks[2].cancel()
            go_on.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result).__name__ for result in results] == [
                "ServerInfo", "CancelledError", "CancelledError", "ServerInfo",
            ]  # fmt: skip

    with serve(script) as served:
        asyncio.run(run(served.url))


def test_an_idle_connection_that_the_server_closes_is_not_used() -> None:
    """Guards: a failed attempt for every keep-alive that ran out, when the loop has heard of it already."""

    def script(session: Session, served: Served) -> None:
        session.request()
        session.send(answer(b'{"name": "s", "version": "1"}'))

    async def run(url: str) -> None:
        async with AsyncClient(url, retries=0) as client:
            for _ in range(3):
                await client.server()
                await asyncio.sleep(0.05)

    with serve(script) as served:
        asyncio.run(run(served.url))
    assert served.connections == 3


def test_a_call_after_close_is_refused() -> None:
    async def run(url: str) -> None:
        client = AsyncClient(url)
        await client.ready()
        await client.close()
        with pytest.raises(ConnectionFailed, match="has been closed"):
            await client.ready()

    with serve(replying(answer())) as served:
        asyncio.run(run(served.url))
    assert served.connections == 1


def test_another_loop_begins_afresh_and_two_at_a_time_are_refused() -> None:
    """Guards: a future of one loop that is awaited in another and never comes."""
    with serve(replying(answer())) as served:
        client = AsyncClient(served.url)

        async def once(close: bool) -> None:
            assert await client.ready()
            if close:
                await client.close()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(once(close=False))
        with pytest.raises(InvalidArgument, match="another event loop"):
            asyncio.run(client.ready())
        loop.run_until_complete(once(close=True))
        loop.close()


def test_many_layers_are_refitted_in_order() -> None:
    """Guards: a refit of many that says less about a failure than the other client's."""

    def script(session: Session, served: Served) -> None:
        while (request := session.request()) is not None:
            served.requests.append(request)
            name = request.path.split("/")[-2]
            body = {"name": name, "version": "4", "previous_version": "3"}
            status = "400 Bad Request" if name == "c" else "200 OK"
            session.send(answer(json.dumps(body).encode(), status=status))

    async def run(url: str) -> None:
        async with AsyncClient(url) as client:
            assert (await client.refit("a", W, if_version=3)).version == "4"
            with pytest.raises(RefitIncomplete, match="2 of 3 layers") as caught:
                await client.refit({"a": W, "b": {"weight": W, "bias": B}, "c": W})
            assert (caught.value.layer, list(caught.value.done)) == ("c", ["a", "b"])
            anything: Any = client
            with pytest.raises(InvalidArgument, match="belong to no layer"):
                await anything.refit({"a": W}, if_version=3)

    with serve(script) as served:
        asyncio.run(run(served.url))
    assert [request.headers.get("if-match") for request in served.requests] == ["3", None, None, None]


def test_a_client_shows_its_address_alone() -> None:
    client = AsyncClient("http://h:1/p/", api_key="secret")
    assert repr(client) == "AsyncClient('http://h:1/p')"
    assert client.url == "http://h:1/p"
    assert gemmwire.AsyncClient is AsyncClient


def test_a_task_that_is_cancelled_as_its_connection_is_made_ends() -> None:
    """Guards: a cancellation that is lost, and the connection that came with it."""

    async def run(url: str) -> None:
        transport = AsyncHTTPTransport(parse_url(url), 1)
        connecting, made = transport._connecting, []

        async def cancelling() -> Any:
            made.append(await connecting())
            task.cancel()
            return made[0]

        transport._connecting = cancelling  # type: ignore[method-assign]
        task = asyncio.ensure_future(transport.send(Request("GET", "/", {}), 20))
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(made[0][1].lost, 20)
        await transport.close()

    with serve(replying(answer(b"{}"))) as served:
        asyncio.run(run(served.url))


def test_what_follows_an_answer_is_not_the_next_one() -> None:
    """Guards: bytes that the loop has not heard of when the connection is used again, read as an answer."""
    large = json.dumps({"name": "asked", "version": "1" + " " * (1 << 19)}).encode()
    unasked = json.dumps({"name": "unasked", "version": "1"}).encode()

    def script(session: Session, served: Served) -> None:
        while session.request() is not None:
            session.send(answer(large) + answer(unasked))

    async def run(url: str) -> list[str]:
        async with AsyncClient(url, retries=9) as client:
            return [(await client.server()).name for _ in range(20)]

    with serve(script) as served:
        assert asyncio.run(run(served.url)) == ["asked"] * 20
