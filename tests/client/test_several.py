"""A client of several servers, over sockets: what it does with calls, and with what goes to all of them."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gemmwire
from certificates import made_for
from either_transport import Loop
from gemmwire import AsyncClient, Client
from gemmwire.connection import Connection
from gemmwire.deadline import Deadline
from gemmwire.nn import RemoteLinear, client_for, operator
from gemmwire.transport import HTTPTransport
from gemmwire.url import parse_urls
from scripted_layer import B, K, W, X, Y, compute, layer
from scripted_server import Script, Served, Session, answer, replying, serve
from serving import Served as Service
from serving import serving, settings, until

Call = Callable[..., Any]
either = pytest.mark.parametrize("kind", [Client, AsyncClient])

NOT_READY = answer(b'{"error": "loading", "code": "not_ready"}', "503 Service Unavailable", retry_after="1")
REFITTED = {"name": "a", "version": "4", "previous_version": "3", "quantization_error": 0.02}


def refitted(**changes: Any) -> bytes:
    return answer(json.dumps(REFITTED | changes).encode())


@contextmanager
def calling(kind: type[Client | AsyncClient], urls: Any, **options: Any) -> Iterator[Call]:
    """`call("infer", "a", x)` of either client; calls of an AsyncClient share one loop."""
    if kind is Client:
        with Client(urls, **options) as client:
            yield lambda name, *args, **named: getattr(client, name)(*args, **named)
        return
    loop = Loop()
    tasks = AsyncClient(urls, **options)
    try:
        yield lambda name, *args, **named: loop.run(getattr(tasks, name)(*args, **named))
    finally:
        loop.run(tasks.close())
        loop.stop()


@contextmanager
def several(*scripts: Script) -> Iterator[list[Served]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serve(script)) for script in scripts]


def urls(served: list[Served]) -> list[str]:
    return [each.url for each in served]


def nobody() -> str:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


@contextmanager
def full_backlog() -> Iterator[str]:
    """An address at which a connection is neither made nor refused."""
    with socket.socket() as full, ExitStack() as links:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            link = links.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(full.getsockname())
        yield f"http://127.0.0.1:{full.getsockname()[1]}"


def hang_up(listener: socket.socket, done: threading.Event) -> None:
    """On each connection, until the listener is shut down."""
    with suppress(OSError):
        while True:
            listener.accept()[0].close()
            done.set()


def dying(session: Session, served: Served) -> None:
    """Takes a request and is gone."""
    request = session.request()
    if request is not None:
        served.requests.append(request)


@either
def test_calls_are_shared_and_each_server_is_addressed_as_itself(kind: type[Client]) -> None:
    with several(layer, layer) as served, calling(kind, urls(served)) as call:
        for _ in range(10):
            assert np.array_equal(call("infer", "a", X), Y)
    assert [len(each.requests) for each in served] == [5, 5]
    assert [each.connections for each in served] == [1, 1]
    for each in served:
        assert {request.headers["host"] for request in each.requests} == {f"127.0.0.1:{each.port}"}


@either
@pytest.mark.parametrize("lost", ["refused", "dying", "not-ready"])
@pytest.mark.parametrize("retries", [0, 2])
def test_a_call_goes_from_a_server_that_is_lost_to_another(
    kind: type[Client], lost: str, retries: int
) -> None:
    """Guards: a call that fails, or waits, while another server would answer it."""
    with several(layer, {"dying": dying}.get(lost, replying(NOT_READY))) as (good, bad):
        address = nobody() if lost == "refused" else bad.url
        with calling(kind, [address, good.url], retries=retries) as call:
            for _ in range(6):
                assert np.array_equal(call("infer", "a", X), Y)
    assert len(good.requests) == 6
    assert len(bad.requests) == (0 if lost == "refused" else 1)  # and is aside after that


@either
def test_the_next_server_is_told_the_time_that_is_left(kind: type[Client]) -> None:
    """Guards: a server that computes for a caller who has gone."""

    def slow(session: Session, served: Served) -> None:
        dying(session, served)
        time.sleep(0.2)

    with several(slow, layer) as served, calling(kind, urls(served), timeout=20) as call:
        assert np.array_equal(call("infer", "a", X, min_version=7), Y)
    told = []
    for each in served:
        (request,) = each.requests
        head = request.body[: int(request.headers["inference-header-content-length"])]
        told.append(json.loads(head)["parameters"])
    assert [each["minimum_version"] for each in told] == [7, 7]
    assert told[0]["timeout"] == 20_000_000
    assert told[1]["timeout"] <= 19_800_000


@either
def test_a_server_that_never_accepts_costs_a_call_a_part_of_its_time(
    kind: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a machine without power, whose silence takes the whole timeout of every call."""
    for module in ("balanced", "async_balanced"):
        monkeypatch.setattr(f"gemmwire.{module}.CONNECT_S", 0.05)
    with full_backlog() as silent, several(layer) as (good,):
        with calling(kind, [silent, good.url], timeout=20) as call:
            assert np.array_equal(call("infer", "a", X), Y)
        with (
            calling(kind, [silent, nobody()], timeout=20, retries=0) as call,
            pytest.raises(gemmwire.ConnectionFailed, match=r"2 servers .* no connection within 0.05 s"),
        ):
            call("infer", "a", X)


@either
def test_a_short_call_survives_a_server_that_never_accepts(kind: type[Client]) -> None:
    """Guards: a timeout below the 3 s that a connection may take, all of which goes into making one."""
    with (
        full_backlog() as silent,
        several(layer) as (good,),
        calling(kind, [silent, good.url], timeout=1.5, retries=0) as call,
    ):
        assert np.array_equal(call("infer", "a", X), Y)


def test_many_calls_wait_once_for_a_server_that_never_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: 3 s for each of the calls that are sent before the first is known to be lost."""
    connections = 0
    connect = HTTPTransport._connect

    def counted(transport: HTTPTransport, deadline: Deadline) -> Connection:
        nonlocal connections
        connections += transport.url == parse_urls(silent)[0]
        return connect(transport, deadline)

    monkeypatch.setattr(HTTPTransport, "_connect", counted)
    monkeypatch.setattr("gemmwire.balanced.CONNECT_S", 0.05)
    monkeypatch.setattr("gemmwire.balancer._FIRST_S", 60.0)
    with full_backlog() as silent, several(layer) as (good,), Client([silent, good.url]) as client:
        for y in client.infer_many([("a", X)] * 16):
            assert np.array_equal(y, Y)
    assert connections == 1


@either
def test_where_no_server_answers_the_error_names_each(kind: type[Client]) -> None:
    addresses = [nobody(), nobody()]
    with calling(kind, addresses, retries=0) as call:
        for _ in range(2):  # also when both are aside
            with pytest.raises(gemmwire.ConnectionFailed) as caught:
                call("infer", "a", X)
            assert all(address in str(caught.value) for address in addresses)


@either
def test_a_server_that_comes_back_is_used_again(kind: type[Client]) -> None:
    """Guards: a server that is aside for ever."""
    with several(layer) as (good,):
        address = nobody()
        with calling(kind, [address, good.url]) as call:
            call("infer", "a", X)
            with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as back:
                tried = threading.Event()
                threading.Thread(target=hang_up, args=(back, tried), daemon=True).start()
                until(lambda: call("infer", "a", X) is not None and tried.is_set(), "it was not tried again")
                back.shutdown(socket.SHUT_RDWR)


@either
def test_many_calls_survive_a_server_that_dies_among_them(kind: type[Client]) -> None:
    """Guards: the calls that were under way at it, in an error for all of them."""

    def mortal(session: Session, served: Served) -> None:
        while (request := session.request()) is not None:
            served.requests.append(request)
            if len(served.requests) > 5:
                return
            headers, buffers = compute(request.body, request.headers)
            fields = {name.replace("-", "_"): value for name, value in headers.items()}
            session.send(answer(b"".join(buffers), **fields))

    xs = [np.full((1 + i % 7, K), i, np.float32) for i in range(60)]
    with several(mortal, layer) as served, calling(kind, urls(served), retries=0) as call:
        ys = call("infer_many", [("a", x) for x in xs])
    for x, y in zip(xs, ys, strict=True):
        assert np.array_equal(y, x @ W.T + B)
    assert len(served[0].requests) >= 5


@either
def test_a_cancelled_or_interrupted_call_leaves_nothing_outstanding(
    kind: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a server that looks busy for ever."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    if kind is Client:
        monkeypatch.setattr(Connection, "receive", interrupt)
        with several(layer, layer) as served, Client(urls(served)) as client:
            for call in (lambda: client.infer("a", X), lambda: client.infer_many([("a", X)] * 3)):
                with pytest.raises(Interrupted):
                    call()
            assert [host.outstanding for host in client._transport._balancer._hosts] == [0, 0]  # type: ignore[attr-defined]
        return

    def silent(session: Session, served: Served) -> None:
        session.request()
        session.request()

    async def run(addresses: list[str]) -> list[int]:
        async with AsyncClient(addresses) as client:
            tasks = [asyncio.ensure_future(client.infer("a", X)) for _ in range(4)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return [host.outstanding for host in client._transport._balancer._hosts]  # type: ignore[attr-defined]

    with several(silent, silent) as served:
        assert asyncio.run(run(urls(served))) == [0, 0]


@either
def test_ready_is_any_server_and_with_every_it_is_all(kind: type[Client]) -> None:
    with several(replying(answer()), replying(NOT_READY)) as (good, loading):
        with calling(kind, [loading.url, good.url], retries=0) as call:
            assert call("ready")
            assert not call("ready", every=True)
        with calling(kind, [loading.url], retries=0) as call:
            assert not call("ready")
            assert not call("ready", every=True)
        with calling(kind, [good.url, nobody()], retries=0) as call:
            assert call("ready")
            with pytest.raises(gemmwire.ConnectionFailed):
                call("ready", every=True)


@either
def test_a_refit_goes_to_every_server(kind: type[Client]) -> None:
    scripts = (replying(refitted()), replying(refitted(version="9")))
    with several(*scripts) as served, calling(kind, urls(served)) as call:
        result = call("refit", "a", W, bias=B)
        both = call("refit", {"a": {"weight": W, "bias": B}})
    assert (result.version, [each.version for each in result.hosts.values()]) == ("4", ["4", "9"])
    assert list(result.hosts) == urls(served)
    assert [each.version for each in both["a"].hosts.values()] == ["4", "9"]
    assert len({request.body for each in served for request in each.requests}) == 1


@either
def test_a_refit_that_one_server_did_not_take_says_which_and_the_way_out(kind: type[Client]) -> None:
    """Guards: servers that answer differently, and nobody knows."""
    lost = nobody()
    full = replying(answer(b'{"error": "no memory"}', "500 Internal Server Error"))
    with (
        several(replying(refitted()), full) as (good, bad),
        calling(kind, [lost, good.url, bad.url], retries=0) as call,
    ):
        with pytest.raises(gemmwire.OutOfStep) as caught:
            call("refit", "a", W, bias=B)
        with pytest.raises(gemmwire.RefitIncomplete) as incomplete:
            call("refit", {"a": {"weight": W, "bias": B}})
    error = caught.value
    assert (error.layer, list(error.done), list(error.failed)) == ("a", [good.url], [lost, bad.url])
    assert error.done[good.url].version == "4"
    assert isinstance(error.failed[lost], gemmwire.ConnectionFailed)
    text = str(error)
    for part in (
        f"1 of 3 servers have the new weights of layer 'a': {good.url} (version 4)",
        f"{lost}, which may",
    ):
        assert part in text
    assert f"{bad.url}: no memory" in text
    assert "Send the same weights again" in text
    assert isinstance(incomplete.value.__cause__, gemmwire.OutOfStep)
    assert isinstance(copy.copy(error), gemmwire.OutOfStep)


@either
def test_a_refit_that_the_first_server_refuses_is_sent_to_no_other(kind: type[Client]) -> None:
    """Guards: half of the servers with a weight that the other half was wrong to be asked to take."""
    conflict = answer(b'{"error": "is in version 4", "code": "version_conflict"}', "409 Conflict")
    with (
        several(replying(conflict), replying(refitted())) as served,
        calling(kind, urls(served)) as call,
        pytest.raises(gemmwire.Conflict),
    ):
        call("refit", "a", W, bias=B, if_version=3)
    assert [len(each.requests) for each in served] == [1, 0]


@either
def test_a_refusal_after_a_lost_answer_is_no_word_that_nothing_has_changed(kind: type[Client]) -> None:
    """Guards: one server with new weights, the others never asked, and an error that names none of them."""
    conflict = answer(b'{"error": "is in version 4", "code": "version_conflict"}', "409 Conflict")

    def losing(session: Session, served: Served) -> None:
        if served.requests:
            replying(conflict)(session, served)
        else:
            dying(session, served)  # takes the weight, and its answer is lost

    with (
        several(losing, replying(refitted())) as (first, second),
        calling(kind, [first.url, second.url], retries=1) as call,
        pytest.raises(gemmwire.OutOfStep, match="may be its result") as caught,
    ):
        call("refit", "a", W, bias=B, if_version=3)
    assert (list(caught.value.done), list(caught.value.failed)) == ([second.url], [first.url])


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        pytest.param([], "empty list", id="none"),
        pytest.param(["http://a", "http://a:80/"], "given twice", id="twice"),
        pytest.param(["http://a", "ftp://b"], "must start with", id="scheme"),
        pytest.param(["http://a", 3], "must be a string", id="number"),
        pytest.param("http://a http://b", "without spaces", id="string"),
        pytest.param(None, "must be a string", id="nothing"),
    ],
)
def test_addresses_that_cannot_be_are_refused(kind: Any, addresses: Any, reason: str) -> None:
    with pytest.raises(gemmwire.InvalidArgument, match=reason):
        kind(addresses)


def test_what_belongs_to_one_server_is_refused_with_the_way_out() -> None:
    client = Client(["http://127.0.0.1:9", "http://127.0.0.1:10"])
    for call in (client.shared, lambda: client.stats("a")):
        with pytest.raises(gemmwire.InvalidArgument, match=r"this client has 2: make a client of each"):
            call()
    with pytest.raises(gemmwire.InvalidArgument, match="transport replaces the network of one server"):
        Client(["http://a", "http://b"], transport=object())  # type: ignore[arg-type]
    with pytest.raises(gemmwire.InvalidArgument, match=r"http://a and http://b is not https|is not https"):
        Client(["http://a", "http://b"], tls=gemmwire.TLS())
    assert repr(client) == "Client(['http://127.0.0.1:9', 'http://127.0.0.1:10'])"
    with pytest.raises(gemmwire.InputError, match="not copied or pickled"):
        copy.copy(client)


def test_a_list_of_one_is_one_server() -> None:
    with several(layer) as (served,), Client([served.url + "/"]) as client:
        assert (client.url, client.urls) == (served.url, (served.url,))
        assert np.array_equal(client.infer("a", X), Y)


@either
def test_a_closed_client_says_so_and_tries_no_other(kind: type[Client]) -> None:
    with several(layer, layer) as served, calling(kind, urls(served)) as call:
        call("infer", "a", X)
        call("close")
        with pytest.raises(gemmwire.ConnectionFailed, match="client has been closed") as caught:
            call("infer", "a", X)
    assert not caught.value.passing


def test_a_fork_goes_on_by_connections_of_its_own() -> None:
    """Guards: bytes of the parent's requests that a child takes for outstanding for ever."""
    program = """
        import os, sys, numpy
        from gemmwire import Client

        client = Client(sys.argv[1:])
        x = numpy.ones((2, 4), numpy.float32)
        y = client.infer("a", x)
        child = os.fork()
        for _ in range(4):
            assert (client.infer("a", x) == y).all()
        assert [host.outstanding for host in client._transport._balancer._hosts] == [0, 0]
        if not child:
            os._exit(0)
        sys.exit(os.waitpid(child, 0)[1])
    """
    with several(layer, layer) as served:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *urls(served)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.stderr, done.returncode) == ("", 0)
    assert sum(len(each.requests) for each in served) == 9


@either
def test_schemes_may_be_mixed(kind: type[Client], tmp_path: Path) -> None:
    """https with a certificate, http with a Unix socket beside it: the same bits from each."""
    certificate = made_for("IP:127.0.0.1", tmp_path)
    path = tmp_path / "s"
    with (
        serving(settings(random_layer=("r=64x96",), uds=str(path))) as plain,
        serving(settings(random_layer=("r=64x96",), tls_cert=str(certificate))) as secure,
    ):
        addresses = [plain.url, f"unix://{path}", f"https://127.0.0.1:{secure.port}"]
        x = np.arange(4 * 96, dtype=np.float32).reshape(4, 96) / 64
        with Client(plain.url) as one:
            expected = one.infer("r", x)
        with calling(kind, addresses, tls=gemmwire.TLS(ca=str(certificate))) as call:
            for _ in range(6):
                assert np.array_equal(call("infer", "r", x), expected)
        with Client(plain.url) as one, Client(addresses[2], tls=gemmwire.TLS(ca=str(certificate))) as other:
            counts = [each.stats("r")["inference_stats"]["success"]["count"] for each in (one, other)]
    assert counts == [1 + 2 * 2, 2]


@pytest.fixture
def two() -> Iterator[list[Service]]:
    with ExitStack() as stack:
        options = settings(random_layer=("r=64x96",))
        yield [stack.enter_context(serving(options)) for _ in range(2)]


@either
def test_a_version_is_answered_by_the_server_that_has_it(two: list[Service], kind: type[Client]) -> None:
    """Guards: a rolling refit under which a call for one version fails every other time."""
    x = np.ones((1, 96), np.float32)
    with Client(two[1].url) as one:
        assert one.refit("r", np.ones((64, 96), np.float32)).version == "2"
    with calling(kind, [served.url for served in two]) as call:
        for version in (1, 2, 2, 1, 1, 2):
            got = call("call", "r", x, version=version)
            assert got.version == str(version)
            assert (got.y == 96).all() == (version == 2)
        assert {call("call", "r", x).version for _ in range(4)} == {"1", "2"}
        with pytest.raises(gemmwire.NotFound):
            call("infer", "r", x, version=3)
        # Sent again, to all, they are in step.
        result = call("refit", "r", np.ones((64, 96), np.float32))
        assert [each.version for each in result.hosts.values()] == ["2", "3"]
        assert all((call("infer", "r", x) == 96).all() for _ in range(4))


def test_models_work_through_it(two: list[Service], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: remote layers, their copies and their pickles, which name their client by its URL."""
    x = torch.arange(2 * 96).view(2, 96) / 64
    with Client([served.url for served in two]) as client:
        linear = RemoteLinear(client, "r")
        expected = client.infer("r", x)
        assert torch.equal(linear(x), expected)
        assert torch.equal(nn.Sequential(copy.deepcopy(linear))(x), expected)
    # As in another process, that has the module by a pickle.
    monkeypatch.setattr(operator, "_clients", {})
    assert torch.equal(linear(x), expected)
    assert torch.equal(linear(x), expected)
    assert client_for(linear.url).urls == tuple(served.url for served in two)
    client_for(linear.url).close()
    for served in two:
        with Client(served.url) as one:
            assert one.stats("r")["inference_stats"]["success"]["count"] >= 2
