"""The real nginx with the example of deploy/, in front of servers of a test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving import until
from source_tree import ROOT

CONF = ROOT / "deploy" / "nginx" / "gemmwire.conf"
_LISTEN, _SOCKETS = "127.0.0.1:8000", "/run/gemmwire/"
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def installed() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def binary() -> str:
    found = installed()
    if found is None:
        pytest.skip("there is no nginx; on Debian: apt-get install nginx-light")
    return found


def configured(folder: Path, port: int) -> Path:
    """nginx's own file around the example, whose sockets are 0.sock and 1.sock in `folder`."""
    text = CONF.read_text()
    assert text.count(_LISTEN) == 1
    assert text.count(_SOCKETS) == 2
    (folder / "gemmwire.conf").write_text(
        text.replace(_LISTEN, f"127.0.0.1:{port}").replace(_SOCKETS, f"{folder}/")
    )
    temporary = "".join(f"{name}_temp_path {folder}/{name}; " for name in _TEMPORARY)
    lines = [
        *([] if os.geteuid() else ["user root;"]),  # who else could not reach the sockets in `folder`
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log;",
        "worker_processes 2; events {}",
        f"http {{ access_log off; {temporary} include {folder}/gemmwire.conf; }}",
    ]
    path = folder / "nginx.conf"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """-> its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [binary(), "-p", str(folder), "-c", str(configured(folder, port))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            until(lambda: running.poll() is not None or _listens(port), "nginx did not start")
            assert running.poll() is None, running.stderr and running.stderr.read()
            yield f"http://127.0.0.1:{port}"
        finally:
            running.terminate()
            running.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
