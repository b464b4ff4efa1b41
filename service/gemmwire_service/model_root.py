"""The folder whose checkpoints a client may have loaded, by name and by nothing but a name.

A name is one path segment of letters, digits and `._-` that begins with a letter or digit; so none leads up,
down or to a hidden folder, however it was encoded. What it leads to must lie in the root when every link has
been followed, and so must each file in it, in its folders too: a shard index can name what lies there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ModelRefused, ModelUnknown, SettingsError

SUFFIXES = (".safetensors", ".safetensors.index.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class ModelRoot:
    """`path` has no links in it."""

    path: Path

    @classmethod
    def of(cls, text: str) -> ModelRoot:
        """Errors: SettingsError."""
        path = Path(os.path.realpath(Path(text).expanduser()))
        if not path.is_dir():
            raise SettingsError(
                f"--model-root is {text!r}: no such folder; name the one that holds the models",
                expected="a folder",
                got=text,
            )
        return cls(path)

    def find(self, name: str) -> Path:
        """The folder of a model, links followed. Errors: ModelRefused, ModelUnknown."""
        if not _NAME.fullmatch(name):
            raise ModelRefused(
                f"{name[:120]!r} is not the name of a model: letters, digits and '._-', at most 128 and "
                "beginning with a letter or digit; POST /v2/repository/index lists what can be loaded",
                expected="a name",
                got=name[:120],
            )
        folder = Path(os.path.realpath(self.path / name))
        if not folder.is_dir():
            raise ModelUnknown(
                f"There is no model {name!r} in the model root; POST /v2/repository/index lists what can be "
                "loaded",
                got=name,
            )
        why = self._unfit(folder)
        if why is not None:
            raise ModelRefused(f"Model {name!r} cannot be loaded: {why}", got=name)
        return folder

    def names(self) -> dict[str, str | None]:
        """Every folder that could be a model, and why it cannot be loaded, or None."""
        return dict(self._names())

    def _names(self) -> Iterator[tuple[str, str | None]]:
        for entry in sorted(self._entries(self.path)):
            folder = Path(os.path.realpath(self.path / entry))
            if _NAME.fullmatch(entry) and folder.is_dir():
                yield entry, self._unfit(folder)

    def _unfit(self, folder: Path) -> str | None:
        if not self._holds(folder):
            return "it is a link that leads out of the model root; copy or mount it there instead"
        entries = self._entries(folder)
        if not any(entry.endswith(SUFFIXES) for entry in entries):
            return f"its folder holds no {' and no '.join(SUFFIXES)} file"
        out = next(self._outside(folder), None)
        if out is not None:
            return f"its file {out[:120]!r} is a link that leads out of the model root; copy it there"
        return None

    def _outside(self, folder: Path) -> Iterator[str]:
        """Names of what can be reached from a folder and does not lie in the root."""
        seen, waiting = {folder}, [folder]
        while waiting:
            here = waiting.pop()
            for entry in self._entries(here):
                real = Path(os.path.realpath(here / entry))
                if not self._holds(real):
                    yield entry
                elif real not in seen and real.is_dir():
                    seen.add(real)
                    waiting.append(real)

    def _holds(self, path: Path) -> bool:
        return self.path in path.parents

    def _entries(self, folder: Path) -> list[str]:
        try:
            return os.listdir(folder)
        except OSError:
            return []
