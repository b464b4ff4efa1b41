"""pip as it is configured on this machine, for a build in a container: handed over as secrets.

A folder of wheels, which a build does not see, is served to it on the loopback address; nothing else is.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

CERTIFICATES = "/run/secrets/ca.crt"  # where the Dockerfile has the secret of that name


@contextmanager
def build_secrets(folder: Path) -> Iterator[list[str]]:
    """The --secret arguments of a build that installs what pip would install here."""
    found = settings()
    with ExitStack() as stack:
        lines = ["[global]"]
        for name in ("index-url", "extra-index-url", "proxy", "timeout", "trusted-host"):
            values = [value for value in found.get(name, "").split() if not value.startswith("file:")]
            if values:
                lines.append(f"{name} = {' '.join(values)}")
        links = [stack.enter_context(_link(place)) for place in found.get("find-links", "").split()]
        if links:
            lines.append(f"find-links = {' '.join(links)}")
        secrets = []
        if "cert" in found:
            lines.append(f"cert = {CERTIFICATES}")
            secrets = ["--secret", f"id=ca.crt,src={found['cert']}"]
        (folder / "pip.conf").write_text("\n".join(lines) + "\n")
        yield ["--secret", f"id=pip.conf,src={folder / 'pip.conf'}", *secrets]


def settings() -> dict[str, str]:
    """What `pip config list` says, by the option's name; the environment counts more than a file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, equals, value = line.partition("=")
        if equals:
            found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return found


@contextmanager
def _link(place: str) -> Iterator[str]:
    """`place` as the build reaches it."""
    folder = Path(place.removeprefix("file://"))
    if not folder.is_dir():
        yield place
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass
