"""The newest weights of layers, in a folder that all servers of one checkpoint see.

    LAYER@VERSION.safetensors     as the body of a refit, LAYER with %-escapes; version 1 is the checkpoint's
                                  (of a name too long for a file: its beginning, ~ and its SHA-256)

A file appears whole, under a number that nobody else can take: so the folder decides which weight a version
is, whichever servers come, go, or fail between two steps. Of each layer the newest and the one before are
kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from .backends.base import LayerSpec
from .checkpoint.base import LayerWeights
from .errors import CheckpointError, DeviceFailed, SettingsError, VersionConflict
from .refit import refuse_version
from .safetensors_body import largest, read_weights

log = logging.getLogger("gemmwire.refit")

_FILE = re.compile(r"(?P<stem>[^@]+)@(?P<version>[1-9][0-9]{0,17})\.safetensors")
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")
_ABANDONED_S = 3600.0  # after which nobody writes to a partial file: its server was killed
_STEM = 200  # bytes of a file's name, of 255, that a layer's name may take as it is
_KEPT = 2  # versions: a server that has just found one may still be about to read it
_ATTEMPTS = 10  # to read the newest, or to take the next number, while others do


class RefitFolder:
    """Every method blocks, as long as the folder's storage does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, text: str) -> RefitFolder:
        """Errors: SettingsError."""
        path = Path(text).expanduser()
        if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise SettingsError(
                f"--refit-dir is {text!r}, which is no folder that this server can write to; make it, where "
                "all servers of the checkpoint see it",
                expected="a folder",
                got=text,
            )
        return cls(path)

    def newest(self, layers: Iterable[str]) -> dict[str, int]:
        """The newest version of each of `layers` that was ever given a new weight. Errors: OSError."""
        found: dict[str, int] = {}
        for stem, version in self._files():
            found[stem] = max(version, found.get(stem, 0))
        return {layer: found[_stem(layer)] for layer in layers if _stem(layer) in found}

    def newest_of(self, layer: str) -> int:
        """1 where it was never given a new weight. Errors: DeviceFailed."""
        try:
            return self.newest([layer]).get(layer, 1)
        except OSError as error:
            raise self._takes_nothing(layer, error) from error

    def read(self, spec: LayerSpec, version: int) -> LayerWeights:
        """Errors: CheckpointError; FileNotFoundError where newer ones have replaced it."""
        path = self._path(spec.name, version)
        view = _read(path, largest(spec))
        try:
            return read_weights(view, spec)
        except CheckpointError as error:
            message = f"{path}: {error}. Is it of another checkpoint? Then empty the folder"
            raise CheckpointError(message, expected=error.expected, got=error.got) from error

    def read_newest(self, spec: LayerSpec) -> tuple[int, LayerWeights] | None:
        """-> (version, weight); None where the checkpoint's is the newest. Errors: CheckpointError."""
        for _ in range(_ATTEMPTS):
            version = self.newest([spec.name]).get(spec.name)
            if version is None:
                return None
            with suppress(FileNotFoundError):
                return version, self.read(spec, version)
        raise CheckpointError(
            f"{self.path}: the newest weight of layer {spec.name!r} was replaced {_ATTEMPTS} times while it "
            "was read; start again when fewer come"
        )

    def publish(self, layer: str, body: memoryview, served: int, if_version: int | None) -> int:
        """Give a checked weight the next version, which it returns. `served`: the version of this server's.

        Errors: VersionConflict where another than `if_version` is the newest; DeviceFailed where nothing can
        be written.
        """
        partial = self.path / f".{uuid.uuid4().hex}.partial"
        try:
            _write(partial, body)
            for _ in range(_ATTEMPTS):
                newest = max(served, self.newest_of(layer))
                refuse_version(layer, newest, if_version)
                with suppress(FileExistsError):
                    os.link(partial, self._path(layer, newest + 1))
                    self._clear(layer, newest + 1)
                    return newest + 1
        except OSError as error:
            raise self._takes_nothing(layer, error) from error
        finally:
            with suppress(OSError):
                partial.unlink()
        raise VersionConflict(
            f"Layer {layer!r} is given new weights too fast by others to find a free version; send it again"
        )

    def _takes_nothing(self, layer: str, error: OSError) -> DeviceFailed:
        return DeviceFailed(
            f"The new weight of layer {layer!r} could not be kept in {self.path} "
            f"({error.strerror or error}); no server has taken it. Is the folder there, with room, and may "
            "this server write to it? Then send it again"
        )

    def _clear(self, layer: str, newest: int) -> None:
        """Remove what nobody needs any more, as far as that goes: the new weight is published already."""
        try:
            for stem, version in self._files():
                if stem == _stem(layer) and version <= newest - _KEPT:
                    self._path(layer, version).unlink(missing_ok=True)
            for partial in filter(_PARTIAL.fullmatch, os.listdir(self.path)):
                _remove_abandoned(self.path / partial)
        except OSError as error:
            log.warning("%s: what is out of use could not be removed: %s", self.path, error)

    def _files(self) -> Iterator[tuple[str, int]]:
        for name in os.listdir(self.path):
            match = _FILE.fullmatch(name)
            if match is not None:
                yield match["stem"], int(match["version"])

    def _path(self, layer: str, version: int) -> Path:
        return self.path / f"{_stem(layer)}@{version}.safetensors"


def _stem(layer: str) -> str:
    """What files of the layer begin with."""
    name = quote(layer, safe="")
    return name if len(name) <= _STEM else f"{name[:100]}~{hashlib.sha256(name.encode()).hexdigest()}"


def _read(path: Path, limit: int) -> memoryview:
    """All bytes of a file that has at most `limit`. Errors: CheckpointError, OSError."""
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(
            f"{path}: is not a regular file; remove it", expected="a file", got=oct(info.st_mode)
        )
    if info.st_size > limit:
        raise CheckpointError(
            f"{path}: has {info.st_size} bytes, and the layer's weight at most {limit}. Is it of another "
            "checkpoint? Then empty the folder",
            expected=f"at most {limit}",
            got=info.st_size,
        )
    with open(path, "rb", buffering=0) as file:
        view, got = memoryview(bytearray(info.st_size)), 0
        while got < len(view):
            more = file.readinto(view[got:])
            if not more:
                raise CheckpointError(f"{path}: it ends after {got} of {len(view)} bytes; it was cut")
            got += more
    return view


def _remove_abandoned(path: Path) -> None:
    with suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime > _ABANDONED_S:
            path.unlink()


def _write(path: Path, body: memoryview) -> None:
    """On the storage when this returns, so that no crash leaves half of it under a version's name."""
    with open(path, "xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
