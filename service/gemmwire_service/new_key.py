"""gemmwire-serve key NAME: draw an API key, and the line of it for the key file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import OutputError
from .keys import INFER, SCOPES, key_of, make_key, parse_keys

_MODE = 0o644  # the service may run as another user, as in a container; hashes are no secret


def main(arguments: Sequence[str]) -> int:
    """The key goes to standard output and nowhere else. Errors: SettingsError, OutputError."""
    options = parser().parse_args(list(arguments))
    key = make_key()
    line = key_of(options.name, options.scope or [INFER], key).line()
    if options.file is None:
        print(key)
        print(line)
        _say("the first line is the key, shown this once; the second goes into the key file")
        return 0
    append(options.file, line)
    print(key)
    _say(f"the key is shown this once; {options.file} has its hash. A running server reads it at SIGHUP")
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="gemmwire-serve key",
        description="Draw an API key for gemmwire-serve --key-file. The file holds a hash of it; the key "
        "itself is printed once and kept nowhere.",
        allow_abbrev=False,
    )
    result.add_argument("name", metavar="NAME", help="who has the key: letters, digits and '._@-'")
    result.add_argument(
        "--scope",
        action="append",
        choices=SCOPES,
        help="what the key is for: infer (the default), or admin (load, unload, refit, shared memory); "
        "may be repeated",
    )
    result.add_argument("--file", type=Path, metavar="FILE", help="key file to add the line to")
    return result


def append(path: Path, line: str) -> None:
    """Add a line, to a file that is made if it is not there. Errors: OutputError; SettingsError where the
    file is no key file, or has the name already."""
    try:
        before = path.read_text(encoding="ascii") if path.exists() else ""
        text = before + ("\n" if before and not before.endswith("\n") else "") + line + "\n"
        parse_keys(str(path), text)
        new = path.with_name(f"{path.name}.new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _mode(path)), "w") as file:
            file.write(text)
        os.replace(new, path)
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"The key cannot be written to {path}: {error}", got=str(path)) from None


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777 if path.exists() else _MODE


def _say(text: str) -> None:
    print(f"gemmwire-serve key: {text}", file=sys.stderr)
