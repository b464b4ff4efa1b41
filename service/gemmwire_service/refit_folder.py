"""The newest weights of layers, in a folder that all servers of one checkpoint see.

    LAYER@VERSION.safetensors     as the body of a refit, LAYER with %-escapes; version 1 is the checkpoint's

A file appears whole, under a number that nobody else can take: so the folder decides which weight a version
is, whichever servers come, go, or fail between two steps. Of each layer the newest and the one before are
kept.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from .backends.base import LayerSpec
from .checkpoint.base import LayerWeights
from .errors import CheckpointError, DeviceFailed, SettingsError, VersionConflict
from .safetensors_body import read_weights

_FILE = re.compile(r"(?P<layer>[^@]+)@(?P<version>[1-9][0-9]{0,17})\.safetensors")
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

    def newest(self) -> dict[str, int]:
        """The newest version of each layer that was ever given a new weight."""
        found: dict[str, int] = {}
        for layer, version in self._files():
            found[layer] = max(version, found.get(layer, 0))
        return found

    def read(self, spec: LayerSpec, version: int) -> LayerWeights:
        """Errors: CheckpointError; FileNotFoundError where newer ones have replaced it."""
        path = self._path(spec.name, version)
        with open(path, "rb", buffering=0) as file:
            body = bytearray(os.fstat(file.fileno()).st_size)
            view, got = memoryview(body), 0
            while got < len(body):
                more = file.readinto(view[got:])
                if not more:
                    raise CheckpointError(f"{path}: it ends after {got} of {len(body)} bytes; it was cut")
                got += more
        try:
            return read_weights(view, spec)
        except CheckpointError as error:
            message = f"{path}: {error}. Is it of another checkpoint? Then empty the folder"
            raise CheckpointError(message, expected=error.expected, got=error.got) from error

    def read_newest(self, spec: LayerSpec) -> tuple[int, LayerWeights] | None:
        """-> (version, weight); None where the checkpoint's is the newest. Errors: CheckpointError."""
        for _ in range(_ATTEMPTS):
            version = self.newest().get(spec.name)
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
                newest = max(served, self.newest().get(layer, 1))
                refuse_other(layer, newest, if_version)
                with suppress(FileExistsError):
                    os.link(partial, self._path(layer, newest + 1))
                    self._clear(layer, newest + 1)
                    return newest + 1
        except OSError as error:
            raise DeviceFailed(
                f"The new weight of layer {layer!r} could not be kept in {self.path} "
                f"({error.strerror or error}); no server has taken it. Make room there and send it again"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
        raise VersionConflict(
            f"Layer {layer!r} is given new weights too fast by others to find a free version; send it again"
        )

    def _clear(self, layer: str, newest: int) -> None:
        for name, version in self._files():
            if name == layer and version <= newest - _KEPT:
                self._path(layer, version).unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[str, int]]:
        for name in os.listdir(self.path):
            match = _FILE.fullmatch(name)
            if match is not None:
                yield unquote(match["layer"]), int(match["version"])

    def _path(self, layer: str, version: int) -> Path:
        return self.path / f"{quote(layer, safe='')}@{version}.safetensors"


def refuse_other(layer: str, newest: int, if_version: int | None) -> None:
    """Errors: VersionConflict."""
    if if_version is not None and if_version != newest:
        raise VersionConflict(
            f"The newest version of layer {layer!r} is {newest}, not {if_version}: its weight has been "
            "replaced since. Look at what is served now, then ask again with its version, or without one",
            expected=newest,
            got=if_version,
        )


def _write(path: Path, body: memoryview) -> None:
    """On the storage when this returns, so that no crash leaves half of it under a version's name."""
    with open(path, "xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
