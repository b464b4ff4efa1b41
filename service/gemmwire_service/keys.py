"""API keys: a file of their hashes, and which of them a request shows.

One key a line: a name, its scopes, and the SHA-256 of the key.

    trainer  infer,admin  sha256:6c1e0d...

A key is 256 random bits that `gemmwire-serve key` draws, so that a fast hash is enough: there is no
dictionary of them to try. The file is no secret for the same reason, but who can write it can let anybody in.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import SettingsError

log = logging.getLogger("gemmwire.access")

INFER, ADMIN = "infer", "admin"
SCOPES = (INFER, ADMIN)
PREFIX = "gmw_"  # so that who finds a key in a log or a commit knows what it is
LONGEST_FILE = 1 << 20  # bytes

_SECRET_BYTES = 32
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_MAKE = "gemmwire-serve key NAME writes such a line"


@dataclass(frozen=True)
class Key:
    """What is known of a key; the key itself is not."""

    name: str
    scopes: frozenset[str]
    digest: bytes

    def line(self) -> str:
        scopes = ",".join(scope for scope in SCOPES if scope in self.scopes)
        return f"{self.name} {scopes} sha256:{self.digest.hex()}"


class Keys:
    """The keys of one reading of the file."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, shown: bytes) -> Key | None:
        """The key that these bytes are. Every key is compared, each in the same time, whatever is shown."""
        digest = digest_of(shown)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def make_key() -> str:
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def key_of(name: str, scopes: Iterable[str], key: str) -> Key:
    """Errors: SettingsError for a name that a line cannot hold, or for scopes that there are not."""
    return Key(_name(name, "NAME"), _scopes(",".join(scopes), "--scope"), digest_of(key.encode()))


def read_keys(path: str) -> Keys:
    """Errors: SettingsError, naming the line and never its words: they might be a key."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
            if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
                log.warning("everybody on this machine can write to the key file %s: chmod o-w", path)
        text = content.decode("ascii")
    except OSError as error:
        raise SettingsError(
            f"The key file {path} cannot be read ({error.strerror or error}); {_MAKE} into one", got=path
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(f"The key file {path} is no text of ASCII letters; {_MAKE}", got=path) from None
    if len(content) > LONGEST_FILE:
        raise SettingsError(f"The key file {path} has more than {LONGEST_FILE} bytes: is it one?", got=path)
    return parse_keys(path, text)


def parse_keys(path: str, text: str) -> Keys:
    """What `path` would hold. Errors: SettingsError."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _key(words, f"{path}, line {number}")
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise SettingsError(f"{path}, line {number}: its name or its key is there above; remove one")
        keys.append(key)
    if not keys:
        raise SettingsError(f"The key file {path} has no key, so that nobody could get in; {_MAKE}", got=path)
    return Keys(keys)


def _key(words: list[str], where: str) -> Key:
    if len(words) != 3:
        raise SettingsError(
            f"{where}: {len(words)} words; it must be NAME SCOPES sha256:HASH; {_MAKE}",
            expected=3,
            got=len(words),
        )
    found = _HASH.fullmatch(words[2])
    if found is None:
        raise SettingsError(
            f"{where}: the third word must be sha256: and 64 hexadecimal digits, never the key itself; "
            f"{_MAKE}"
        )
    return Key(_name(words[0], where), _scopes(words[1], where), bytes.fromhex(found[1]))


def _name(text: str, where: str) -> str:
    if not _NAME.fullmatch(text) or text.startswith(PREFIX):
        raise SettingsError(
            f"{where}: a key's name must be 1 to 64 of letters, digits and '._@-', beginning with a letter "
            f"or digit, and not with {PREFIX}"
        )
    return text


def _scopes(text: str, where: str) -> frozenset[str]:
    scopes = frozenset(text.split(","))
    if not scopes <= set(SCOPES):
        raise SettingsError(f"{where}: the scopes must be {INFER}, {ADMIN} or both as {INFER},{ADMIN}")
    return scopes
