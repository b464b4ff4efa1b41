"""gemmwire-serve as a process: whom it lets in, and what a hangup does."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from certificates import made_for
from keyed import Drawn, bearer, drawn
from process import fails, process
from serving import until

pytestmark = pytest.mark.e2e

LAYER = ("--random-layer", "r=8x64")


@pytest.fixture
def keys(tmp_path: Path) -> Drawn:
    return drawn(tmp_path)


def status(url: str, key: str = "", context: ssl.SSLContext | None = None) -> int:
    try:
        with urlopen(Request(url, headers=bearer(key)), timeout=20, context=context) as reply:
            return int(reply.status)
    except HTTPError as error:
        with error:
            return error.code


def address(printed: list[str]) -> str:
    return next(line.split()[2] for line in printed if line.startswith("ready on "))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_open_to_others_needs_keys_or_the_word(host: str) -> None:
    """Guards: a service without access control on a network, by one flag."""
    code, said = fails("--host", host, "--port", "0", *LAYER)
    if "Cannot bind" in said:
        pytest.skip("this machine has no IPv6")
    assert code == 2
    assert all(words in said for words in ("--key-file", "--insecure", "127.0.0.1"))
    assert "Traceback" not in said


def test_insecure_serves_everybody_and_says_so() -> None:
    with process(*LAYER, "--host", "0.0.0.0", "--insecure") as (running, printed):
        assert status(address(printed) + "/v2") == 200
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        assert "open to everybody" in running.stderr.read()


def test_keys_open_other_addresses(keys: Drawn) -> None:
    with process(*LAYER, "--host", "0.0.0.0", "--key-file", str(keys.path)) as (running, printed):
        url = address(printed)
        assert [status(url + "/v2", key) for key in ("", "gmw_x", keys.infer)] == [401, 401, 200]
        assert "api_key=" in printed[-1]
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        said = running.stderr.read()
    assert "unencrypted" in said
    assert "gmw_" not in said


def test_a_unix_socket_is_local(tmp_path: Path) -> None:
    with process(*LAYER, "--uds", str(tmp_path / "s")) as (running, _):
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0


def test_a_key_file_that_is_none_ends_it_before_it_loads(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("k infer gmw_SECRET\n")
    code, said = fails("--port", "0", "--key-file", str(tmp_path / "keys"))
    assert (code, "line 1" in said, "SECRET" in said, "Traceback" in said) == (2, True, False, False)


def test_a_hangup_reads_the_keys_again(keys: Drawn) -> None:
    with process(*LAYER, "--key-file", str(keys.path)) as (running, printed):
        url = address(printed) + "/v2"
        assert status(url, keys.infer) == 200
        lines = keys.path.read_text().splitlines()
        keys.path.write_text("\n".join(line for line in lines if not line.startswith("i ")))
        running.send_signal(signal.SIGHUP)
        until(lambda: status(url, keys.infer) == 401, "the key is still in force")
        keys.path.write_text("broken")
        running.send_signal(signal.SIGHUP)
        assert [status(url, key) for key in (keys.infer, keys.both)] == [401, 200]
        running.send_signal(signal.SIGTERM)
        assert running.stderr is not None
        said = running.stderr.read()
        assert running.wait(30) == 0
    assert "2 keys are in force" in said
    assert "the 2 keys of before stay in force" in said


def test_a_hangup_reads_the_certificate_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (made_for("IP:127.0.0.1", tmp_path / name) for name in ("a", "b"))
    path = tmp_path / "server.pem"
    path.write_bytes(first.read_bytes())
    with process(*LAYER, "--tls-cert", str(path)) as (running, printed):
        url = address(printed)
        assert url.startswith("https://")
        assert status(url + "/v2", context=ssl.create_default_context(cafile=str(first))) == 200
        path.write_bytes(second.read_bytes())
        running.send_signal(signal.SIGHUP)
        context = ssl.create_default_context(cafile=str(second))

        def renewed() -> bool:
            try:
                return status(url + "/v2", context=context) == 200
            except OSError:
                return False

        until(renewed, "the new certificate is not shown")
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
