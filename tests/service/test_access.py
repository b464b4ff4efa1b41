"""Who may call what, over real sockets and by both paths of infer."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from fastapi import FastAPI

from gemmwire import Client, Forbidden, Unauthorized
from gemmwire_service.access import ANY, OPEN, Access, needed
from gemmwire_service.app import create_app
from gemmwire_service.keys import ADMIN, INFER
from http_calls import call, message
from keyed import Drawn, bearer, drawn
from links import GOOD, X, answers, linked, request, statuses
from serving import Served, serving, settings

INFER_PATH = "/v2/models/m.plain/infer"
BODY, LENGTH = message(X)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    return drawn(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def guarded(keys: Drawn, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    options = settings(
        model=(f"m={checkpoint}",),
        key_file=str(keys.path),
        fast_path=request.param,
        model_root=str(checkpoint.parent),
    )
    with serving(options) as served:
        yield served


def asked(served: Served, **headers: str) -> bytes:
    """The answer to one good infer request with these header fields."""
    with linked(served) as link:
        link.sendall(request(BODY, LENGTH, **headers))
        return answers(link, 1)[0]


def test_infer_takes_a_key_of_its_scope(guarded: Served, keys: Drawn) -> None:
    """Twice each: the second time the head is remembered."""
    for key in (keys.infer, keys.both):
        for scheme in ("Bearer", "bearer", "BEARER"):
            found = [asked(guarded, Authorization=f"{scheme} {key}") for _ in range(2)]
            assert statuses(found) == [200, 200]


def test_a_key_of_another_scope_is_a_403(guarded: Served, keys: Drawn) -> None:
    """Guards: the first answer, remembered for a key that may not."""
    for _ in range(2):
        answer = asked(guarded, Authorization=f"Bearer {keys.admin}")
        assert statuses([answer]) == [403]
        assert b'"code": "scope_missing", "expected": "infer", "got": ["admin"]' in answer
    assert statuses([asked(guarded, Authorization=f"Bearer {keys.infer}")]) == [200]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        pytest.param({}, "key_missing", id="none"),
        pytest.param({"Authorization": "Bearer gmw_wrong"}, "key_unknown", id="wrong"),
        pytest.param({"Authorization": "Bearer"}, "key_malformed", id="empty"),
        pytest.param({"Authorization": "Bearer "}, "key_unknown", id="blank"),
        pytest.param({"Authorization": ""}, "key_malformed", id="nothing"),
        pytest.param({"Authorization": "KEY"}, "key_malformed", id="no-scheme"),
        pytest.param({"Authorization": "Token KEY"}, "key_malformed", id="another-scheme"),
        pytest.param({"Authorization": "Bearer KEY x"}, "key_unknown", id="two-words"),
        pytest.param({"Authorization": "BearerKEY"}, "key_malformed", id="no-space"),
        pytest.param({"Authorization": "Bearer KEY" + "A" * 40_000}, "key_malformed", id="huge"),
        pytest.param({"X-Api-Key": "KEY"}, "key_missing", id="another-header"),
        pytest.param({"Proxy-Authorization": "Bearer KEY"}, "key_missing", id="a-proxy-s"),
        pytest.param({"Cookie": "Authorization=Bearer KEY"}, "key_missing", id="cookie"),
        pytest.param({"Authorization": "Basic BASIC"}, "key_malformed", id="basic-changes-something"),
    ],
)
def test_without_a_key_infer_is_a_401_before_the_body(
    guarded: Served, keys: Drawn, headers: dict[str, str], code: str
) -> None:
    """Guards: a body of a stranger in memory; an answer that repeats the key it was shown."""
    basic = base64.b64encode(f"u:{keys.infer}".encode()).decode()
    fields = {
        name: value.replace("BASIC", basic).replace("KEY", keys.infer) for name, value in headers.items()
    }
    head = request(b"", None, path=INFER_PATH, version="1.1", **fields).replace(
        b"Content-Length: 0", b"Content-Length: 1000"
    )
    with linked(guarded) as link:
        link.sendall(head)
        answer = answers(link, 1)[0]
    assert statuses([answer]) == [401]
    assert f'"code": "{code}"'.encode() in answer
    assert b"www-authenticate: Bearer" in answer
    assert b"Basic" not in answer
    assert keys.infer.encode() not in answer
    assert basic.encode() not in answer


def test_two_keys_are_none(guarded: Served, keys: Drawn) -> None:
    """Guards: a proxy that checks the first field of two, before a server that takes the last."""
    for first, second in ((keys.infer, "gmw_x"), ("gmw_x", keys.infer), (keys.infer, keys.infer)):
        fields = f"authorization: Bearer {first}\r\nAuthorization: Bearer {second}\r\n".encode()
        with linked(guarded) as link:
            link.sendall(request(BODY, LENGTH).replace(b"Host: x\r\n", b"Host: x\r\n" + fields))
            answer = answers(link, 1)[0]
        assert statuses([answer]) == [401]
        assert b"key_malformed" in answer


@pytest.mark.parametrize("name", ["api_key", "access_token", "key", "token", "API-KEY"])
def test_a_key_in_the_address_is_refused(guarded: Served, keys: Drawn, name: str) -> None:
    """Guards: keys in the logs of every proxy on the way."""
    reply = call(guarded, "POST", f"{INFER_PATH}?a=1&{name}={keys.infer}", BODY)
    assert (reply.status, reply.json["code"]) == (401, "key_missing")
    assert "in the address" in reply.json["error"]
    assert keys.infer not in reply.body.decode()


ADMINISTRATION = [
    ("POST", "/v2/repository/models/m/load"),
    ("POST", "/v2/repository/models/m/unload"),
    ("POST", "/v2/repository/models/m/refit"),
    ("PUT", "/v2/repository/models/m.plain/weights"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/region/r/register"),
    ("DELETE", INFER_PATH),
    ("POST", "/v2/models/m.plain/generate"),
    ("POST", "//v2/models/m.plain/infer"),
    ("POST", "/v2/health/ready"),
    ("OPTIONS", "/v2"),
]


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION, ids=lambda value: value)
def test_what_changes_something_needs_the_admin_scope(
    guarded: Served, keys: Drawn, method: str, path: str
) -> None:
    """Guards: a route that was added and that nobody thought of: what is not named needs the most."""
    body = b"{}"
    assert call(guarded, method, path, body).status == 401
    reply = call(guarded, method, path, body, bearer(keys.infer))
    assert (reply.status, reply.json["code"], reply.json["expected"]) == (403, "scope_missing", "admin")
    if path not in ("/v2/repository/models/m/load", "/v2/repository/models/m/unload"):
        assert call(guarded, method, path, body, bearer(keys.admin)).status not in (401, 403)


def test_a_path_in_disguise_is_the_path_that_is_served(guarded: Served, keys: Drawn) -> None:
    """Guards: access that is decided by other letters than those the router reads."""
    path = "/v2/repository/models/%6D/%75nload"
    assert call(guarded, "POST", path, b"{}", bearer(keys.infer)).status == 403
    assert call(guarded, "POST", "/v2/models/a/../../repository/models/m/unload", b"{}").status == 401
    assert call(guarded, "POST", "/v2/models/m.plain%2Finfer", BODY, bearer(keys.admin)).status == 403


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/status", "/docs", "/openapi.json", "/v2", "/v2/models/m.plain", "/nowhere"]
)
def test_reading_needs_any_key_as_a_program_or_a_browser_shows_it(
    guarded: Served, keys: Drawn, path: str
) -> None:
    none = call(guarded, "GET", path)
    assert none.status == 401
    assert (
        none.headers["www-authenticate"] == 'Basic realm="gemmwire", charset="UTF-8", Bearer realm="gemmwire"'
    )
    for key in keys.all:
        basic = base64.b64encode(f"somebody:{key}".encode()).decode()
        for shown in (f"Bearer {key}", f"Basic {basic}"):
            assert call(guarded, "GET", path, headers={"Authorization": shown}).status not in (401, 403)
    for wrong in ("Basic !", "Basic " + base64.b64encode(b"u:gmw_wrong").decode(), "Basic Og=="):
        assert call(guarded, "GET", path, headers={"Authorization": wrong}).status == 401


def test_nobody_is_sent_elsewhere_with_a_key(guarded: Served, keys: Drawn) -> None:
    """Guards: a redirect to http, by a server that does not know of the TLS before it."""
    for method, path in (("GET", "/v2/"), ("GET", "/docs/"), ("POST", "/v2/models/m.plain/infer/")):
        reply = call(guarded, method, path, headers=bearer(keys.both))
        assert (reply.status, reply.headers.get("location")) == (404, None)


def test_the_index_needs_any_key(guarded: Served, keys: Drawn) -> None:
    for key in keys.all:
        assert call(guarded, "POST", "/v2/repository/index", b"{}", bearer(key)).status == 200
    assert call(guarded, "POST", "/v2/repository/index", b"{}").status == 401


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_needs_no_key(guarded: Served, path: str) -> None:
    """Guards: a container that is restarted because its probe has no key."""
    assert call(guarded, "GET", path).status == 200
    assert call(guarded, "GET", path, headers=bearer("gmw_wrong")).status == 200
    assert call(guarded, "HEAD", path).status == 200


def test_the_client_shows_its_key(guarded: Served, keys: Drawn) -> None:
    x = torch.ones(1, 128)
    with Client(guarded.url, api_key=keys.infer) as client:
        assert client.infer("m.plain", x).shape == (1, 64)
        with pytest.raises(Forbidden, match="scope admin"):
            client.refit("m.plain", torch.zeros(64, 128))
    with Client(guarded.url) as client, pytest.raises(Unauthorized, match="Authorization: Bearer"):
        client.infer("m.plain", x)


def test_refusals_are_counted_and_keys_are_in_no_log(
    guarded: Served, keys: Drawn, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    traffic = guarded.engine.traffic
    before, codes = dict(traffic.rejects), traffic.codes.get(401, 0)
    asked(guarded, Authorization="Bearer gmw_wrong")
    call(guarded, "PUT", "/v2/repository/models/m.plain/weights", b"", bearer(keys.infer))
    asked(guarded, Authorization=f"Bearer {keys.infer}")
    assert traffic.rejects["key_unknown"] == before.get("key_unknown", 0) + 1
    assert traffic.rejects["scope_missing"] == before.get("scope_missing", 0) + 1
    assert traffic.codes[401] == codes + 1
    assert "gmw_" not in caplog.text


def test_the_next_request_of_a_connection_needs_a_key_too(guarded: Served, keys: Drawn) -> None:
    """Guards: a connection that is trusted because its first request was; pipelined ones too."""
    good = request(BODY, LENGTH, Authorization=f"Bearer {keys.infer}")
    with linked(guarded) as link:
        link.sendall(good + GOOD + good)
        assert statuses(answers(link, 3)) == [200, 401, 200]


def test_new_keys_are_in_force_with_the_next_request(keys: Drawn, checkpoint: Path, tmp_path: Path) -> None:
    """Guards: a key that was withdrawn and goes on working, since its head is remembered; a broken file that
    lets everybody in, or nobody."""
    path = tmp_path / "keys"
    lines = keys.path.read_text().splitlines()
    path.write_text("\n".join(lines))
    found: list[Access] = []
    options = settings(model=(f"m={checkpoint}",), key_file=str(path))
    with (
        serving(options, prepare=lambda app: found.append(app.access)) as served,
        linked(served) as link,
    ):
        access = found[0]

        def tried() -> list[int]:
            for key in keys.all:
                link.sendall(request(BODY, LENGTH, Authorization=f"Bearer {key}"))
            return statuses(answers(link, 3))

        assert tried() == tried() == [200, 403, 200]
        path.write_text("\n".join(line for line in lines if not line.startswith("i ")))
        access.reload()
        assert tried() == tried() == [401, 403, 200]
        for broken in ("", "i infer gmw_x", "\0"):
            path.write_text(broken)
            access.reload()
            assert tried() == [401, 403, 200]
        path.unlink()
        access.reload()
        assert tried() == [401, 403, 200]
        path.write_text("\n".join(lines))
        access.reload()
        assert tried() == [200, 403, 200]


def test_a_broken_file_is_told_of_and_the_old_keys_stay(
    keys: Drawn, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(keys.path.read_text())
    access = Access(str(path))
    path.write_text(f"i infer {keys.infer}\n")
    access.reload()
    assert "the 3 keys of before stay in force" in caplog.text
    assert "line 1" in caplog.text
    assert keys.infer not in caplog.text
    assert access.takes_infer({b"authorization": f"Bearer {keys.infer}".encode()})


def test_what_is_remembered_is_bounded(keys: Drawn) -> None:
    """Guards: memory that a client fills with spellings of its key."""
    access = Access(str(keys.path))
    for spaces in range(1, 400):
        assert access.takes_infer({b"authorization": b"Bearer " + b" " * spaces + keys.infer.encode()})
    assert not access.takes_infer({b"authorization": b"Bearer " + b" " * 600 + keys.infer.encode()})
    assert access._ring is not None
    assert len(access._ring._passed) <= 256


def test_a_mounted_app_asks_for_keys_too(keys: Drawn) -> None:
    """Guards: routes known by their whole path, under a prefix."""
    outer = FastAPI()
    outer.mount("/gemm", create_app(settings(random_layer=("r=8x32",), key_file=str(keys.path))))

    async def asked() -> list[int]:
        transport = httpx.ASGITransport(outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/gemm") as client:
            replies = [
                await client.post("/v2/models/r/infer"),
                await client.post("/v2/models/r/infer", headers=bearer(keys.admin)),
                await client.get("/v2", headers=bearer(keys.infer)),
                await client.get("/v2/health/live"),
                await client.get("/v2"),
            ]
        return [reply.status_code for reply in replies]

    assert asyncio.run(asked()) == [401, 403, 200, 200, 401]


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/v2/health/live", OPEN),
        ("GET", "/v2/health/live/x", ANY),
        ("GET", "/v2/health/live\n", ANY),
        ("POST", "/v2/models/a/infer", INFER),
        ("POST", "/v2/models/a/versions/1/infer", INFER),
        ("POST", "/v2/models/a/infer\n", ADMIN),
        ("POST", "/v2/models/a/b/infer", ADMIN),
        ("PUT", "/v2/models/a/infer", ADMIN),
        ("BREW", "/", ADMIN),
    ],
)
def test_the_table_of_routes(method: str, path: str, scope: str) -> None:
    assert needed(method, path) == scope


def test_no_route_is_open_by_oversight() -> None:
    """Every route that the app has, and what it needs: add a route here with its scope."""
    app = create_app(settings(random_layer=("r=8x32",)))
    found: dict[str, set[str]] = {}
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            scope = needed(method.upper(), path.replace("{", "").replace("}", ""))
            found.setdefault(scope, set()).add(f"{method.upper()} {path}")
    assert found[OPEN] == {"GET /v2/health/live", "GET /v2/health/ready"}
    assert all(route.endswith("/infer") for route in found[INFER])
    assert all(route.startswith("GET ") or route == "POST /v2/repository/index" for route in found[ANY])


SITES = [
    pytest.param("http://evil.test", "HOST", 403, id="another"),
    pytest.param("null", "HOST", 403, id="sandboxed"),
    pytest.param("http://127.0.0.1:1", "HOST", 403, id="another-port"),
    pytest.param("http://evil.test:8000", "evil.test:8000", 403, id="of-a-name-that-leads-here"),
    pytest.param("http://HOST", "HOST", 200, id="our-own"),
    pytest.param("http://localhost:8000", "localhost:8000", 200, id="our-own-by-name"),
    pytest.param("http://[::1]:8000", "[::1]:8000", 200, id="our-own-ipv6"),
]


@pytest.mark.parametrize(("origin", "host", "status"), SITES)
def test_a_page_of_another_site_changes_nothing(server: Served, origin: str, host: str, status: int) -> None:
    """Guards: a web page that unloads models on the computer of whoever looks at it."""
    here = f"127.0.0.1:{server.port}"
    fields = {"Host": host.replace("HOST", here), "Origin": origin.replace("HOST", here)}
    for path, body in ((INFER_PATH, BODY), ("/v2/repository/index", b"{}")):
        extra = {"Inference-Header-Content-Length": str(LENGTH)} if path == INFER_PATH else {}
        assert call(server, "POST", path, body, fields | extra).status == status
    assert call(server, "GET", "/v2", headers=fields).status == 200
