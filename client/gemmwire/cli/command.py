"""The command line: sub-commands, the options that all of them have, exit statuses.

0: done. 1: an error, or a server that is not ready. 2: a command line that cannot be understood.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmwire import __version__
from gemmwire.client import Client
from gemmwire.errors import GemmwireError, InvalidArgument
from gemmwire.tls import TLS

from . import bench, infer, layers, ping, stats
from .result import Result


@dataclass(frozen=True)
class Command:
    name: str
    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Client, argparse.Namespace], Result]


COMMANDS = (
    Command("layers", "list the layers of a server", layers.add, layers.run),
    Command("infer", "send the rows of a file through a layer", infer.add, infer.run),
    Command("stats", "what the layers have done so far", stats.add, stats.run),
    Command("ping", "whether a server is there, and how far away", ping.add, ping.run),
    Command("bench", "time requests of random rows to a layer", bench.add, bench.run),
)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="gemmwire", description="A gemmwire server, seen from a terminal.")
    whole.add_argument("--version", action="version", version=f"gemmwire {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.help, description=command.help.capitalize() + "."
        )
        sub.add_argument("url", metavar="URL", help="as http://127.0.0.1:8000")
        command.add(sub)
        _add_common(sub)
        sub.set_defaults(run=command.run)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        with _client(options) as client:
            result: Result = options.run(client, options)
        print(json.dumps(result.document, default=str) if options.json else result.text, flush=True)
        return result.status
    except BrokenPipeError:  # `gemmwire layers URL | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GemmwireError, OSError) as error:
        print(f"gemmwire: {_said(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _said(error: Exception) -> str:
    """The message; of a file, its name and what is wrong with it, without the system's number for that."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _add_common(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--url",
        dest="others",
        action="append",
        default=[],
        metavar="URL",
        help="another server of the same layers, to share the calls with; may be repeated",
    )
    sub.add_argument("--json", action="store_true", help="print one JSON document")
    sub.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for a call (60)")
    sub.add_argument(
        "--retries", type=int, default=2, metavar="N", help="of a call that failed in passing (2)"
    )
    sub.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file that holds the key")
    sub.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated")
    sub.add_argument("--ca", metavar="FILE", help="who vouches for an https server, in PEM")
    sub.add_argument("--insecure", action="store_true", help="check no certificate")


def _client(options: argparse.Namespace) -> Client:
    key: Path | None = options.api_key_file
    tls = TLS(ca=options.ca, verify=not options.insecure) if options.ca or options.insecure else None
    return Client(
        [options.url, *options.others] if options.others else options.url,
        timeout=options.timeout,
        retries=options.retries,
        # What is no key is refused by the client, whatever its bytes.
        api_key=None if key is None else key.read_text(encoding="latin-1").strip(),
        headers=dict(map(_header, options.header)),
        tls=tls,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise InvalidArgument("--header takes NAME: VALUE, with a colon between them")
    return name.strip(), value.strip()
