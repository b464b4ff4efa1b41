"""Who may call what: decided from the head of a request, before any of its body is read.

`ROUTES` says which scope each route needs, and what it does not name needs the most. Without keys everybody
who can connect may call everything; only a web page of another site may not, since its visitor, who can
connect, knows nothing of it.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from .errors import (
    AccessRefused,
    CrossSite,
    KeyMalformed,
    KeyMissing,
    KeyUnknown,
    ScopeMissing,
    SettingsError,
)
from .infer import Headers
from .keys import ADMIN, INFER, Key, Keys, read_keys

log = logging.getLogger("gemmwire.access")

OPEN, ANY = "", "any"  # beside the scopes: no key, and a key of whatever scope

SAFE = frozenset({"GET", "HEAD"})
_ALL = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
_LONGEST = 512  # bytes of a field that may show a key
_REMEMBERED = 256
_HEADER = "Authorization: Bearer KEY"
_IN_QUERY = re.compile(rb"(?:^|&)(?:api[-_]?key|access_token|token|key|authorization)=", re.I)


@dataclass(frozen=True)
class Route:
    methods: frozenset[str]
    path: re.Pattern[str]
    scope: str


ROUTES = (
    Route(SAFE, re.compile(r"/v2/health/(live|ready)"), OPEN),
    Route(frozenset({"POST"}), re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/infer"), INFER),
    Route(frozenset({"POST"}), re.compile(r"/v2/repository/index"), ANY),
    Route(_ALL, re.compile(r"/v2/(system|cuda)sharedmemory(/.*)?"), ADMIN),
    Route(SAFE, re.compile(r".*", re.S), ANY),
)
"""The first that fits decides; a request that none fits needs ADMIN."""


def needed(method: str, path: str) -> str:
    for route in ROUTES:
        if method in route.methods and route.path.fullmatch(path):
            return route.scope
    return ADMIN


class Access:
    """The rule of one server. Errors: SettingsError for a key file that is none."""

    def __init__(self, key_file: str = "") -> None:
        self._path = key_file
        self._ring = _Ring(read_keys(key_file)) if key_file else None

    @property
    def by_key(self) -> bool:
        return self._ring is not None

    def reload(self) -> None:
        """Read the file again. A file that cannot be used changes nothing, and the log says so."""
        if self._ring is None:
            return
        try:
            ring = _Ring(read_keys(self._path))
        except SettingsError as error:
            log.error("the %d keys of before stay in force: %s", len(self._ring.keys), error)
            return
        self._ring = ring
        log.info("%d keys are in force, of %s", len(ring.keys), self._path)

    def takes_infer(self, headers: Headers) -> bool:
        """Whether an infer request that no browser sent is allowed; why not is `refuse`'s to say.

        `headers` of a head without repeated fields.
        """
        ring = self._ring
        return ring is None or ring.passes(headers.get(b"authorization"))

    def refuse(
        self, method: str, path: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]
    ) -> AccessRefused | None:
        """Why the request is not allowed. `path` is decoded and has no prefix; names are in lower case."""
        fields = list(headers)
        try:
            if self._ring is None:
                _refuse_other_sites(method, fields)
            else:
                self._ring.check(needed(method, path), method, query, fields)
        except AccessRefused as refusal:
            return refusal
        return None


class _Ring:
    """One reading of the key file, and what has been found in it since."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        # Values of the header that were found to allow infer. Looking one up takes no longer for one that is
        # nearly right: it is compared only once all of its keyed hash is equal.
        self._passed: set[bytes] = set()

    def passes(self, shown: bytes | None) -> bool:
        if shown is None:
            return False
        if shown in self._passed:
            return True
        key = self.keys.find(_bearer(shown)) if _is_bearer(shown) else None
        if key is None or INFER not in key.scopes:
            return False
        if len(self._passed) >= _REMEMBERED:
            self._passed.clear()
        self._passed.add(shown)
        return True

    def check(self, scope: str, method: str, query: bytes, fields: list[tuple[bytes, bytes]]) -> None:
        """Errors: KeyRefused, ScopeMissing."""
        if scope == OPEN:
            return
        browsable = method in SAFE
        shown = [value for name, value in fields if name == b"authorization"]
        if not shown:
            raise KeyMissing(_why_none(query, fields), browsable)
        if len(shown) > 1:
            what = f"Header Authorization came {len(shown)} times; send it once"
            raise KeyMalformed(what, browsable)
        key = self.keys.find(_secret(shown[0], browsable))
        if key is None:
            what = "The API key is none of this server's; ask who runs it for one, or for a new one"
            raise KeyUnknown(what, browsable)
        _refuse_scope(key, scope)


def _why_none(query: bytes, fields: list[tuple[bytes, bytes]]) -> str:
    if _IN_QUERY.search(query):
        return f"A key in the address is not taken, since addresses are logged everywhere; send {_HEADER}"
    if any(name in (b"x-api-key", b"api-key") for name, _ in fields):
        return f"The key is taken from another header; send {_HEADER}"
    client = "with gemmwire.Client by api_key=, with the command gemmwire by --api-key-file"
    return f"This server asks for an API key; send {_HEADER}, {client}"


def _refuse_scope(key: Key, scope: str) -> None:
    if scope != ANY and scope not in key.scopes:
        raise ScopeMissing(
            f"This route needs a key of scope {scope}, and the key {key.name!r} has "
            f"{' and '.join(sorted(key.scopes))}; use another key",
            expected=scope,
            got=sorted(key.scopes),
        )


def _is_bearer(value: bytes) -> bool:
    return len(value) <= _LONGEST and value[:7].lower() == b"bearer "


def _bearer(value: bytes) -> bytes:
    return value[7:].strip()


def _secret(value: bytes, browsable: bool) -> bytes:
    """The key that is shown. A browser, which asks for a name and a password, shows it as the password; that
    is believed only where nothing is changed, for it does so for other sites' pages too. Errors: KeyRefused.
    """
    if len(value) > _LONGEST:
        what = f"Header Authorization has {len(value)} bytes, more than any key; send {_HEADER}"
        raise KeyMalformed(what, browsable)
    if _is_bearer(value):
        return _bearer(value)
    if browsable and value[:6].lower() == b"basic ":
        try:
            return base64.b64decode(value[6:].strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            pass
    raise KeyMalformed(f"Header Authorization is no Bearer key; send {_HEADER}", browsable)


def _refuse_other_sites(method: str, fields: list[tuple[bytes, bytes]]) -> None:
    """Errors: CrossSite, for a call that changes something and that a page of another site makes.

    A browser names that site. It may have this machine's address by a trick of names, so that equal to Host
    is not enough: the site must be an address or localhost.
    """
    origins = [value for name, value in fields if name == b"origin"]
    hosts = [value for name, value in fields if name == b"host"]
    if method in SAFE or not origins:
        return
    if len(origins) > 1 or hosts != [_host_of(origins[0])] or not _is_here(hosts[0]):
        raise CrossSite(
            "A web page of another site made this request, and this server has no keys to tell whether it "
            "may; send it from a program, or set --key-file"
        )


def _host_of(origin: bytes) -> bytes:
    """Host and port, as the header Host has them."""
    return origin.partition(b"://")[2]


def _is_here(host: bytes) -> bool:
    name = re.sub(r":[0-9]+$", "", host.decode("latin-1"))
    if name == "localhost":
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
