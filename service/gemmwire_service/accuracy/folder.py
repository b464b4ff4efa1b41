"""The files of a report, which appear when they are complete and not before."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gemmwire_service.errors import OutputError


class Folder:
    """Where `write` puts a report. A file that is there already is replaced whole."""

    def __init__(self, path: Path, beside: str) -> None:
        """beside: what the names of incomplete files end with."""
        self.path, self.beside = path, beside

    def try_out(self, names: Iterable[str]) -> None:
        """Raises OutputError where it cannot be made or written to, or a folder has one of the names."""
        for name in names:
            if (self.path / name).is_dir():
                raise _failed(self.path / name, IsADirectoryError(errno.EISDIR, "Is a directory"))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            trial = self._new("trial")
            trial.touch(exist_ok=False)
            trial.unlink()
        except OSError as error:
            raise _failed(self.path, error) from None

    def write(self, files: Mapping[str, str]) -> None:
        """Each file's text by its name: all are written in full before the first takes its name.

        Raises OutputError.
        """
        try:
            made = [(self._new(name), self.path / name) for name in files]
            for (new, _), content in zip(made, files.values(), strict=True):
                new.write_text(content, encoding="utf-8")
            for new, name in made:
                new.replace(name)
        except OSError as error:
            raise _failed(self.path, error) from None

    def _new(self, name: str) -> Path:
        return self.path / f".{name}.{self.beside}"


@contextmanager
def opened(path: Path, names: Iterable[str]) -> Iterator[Folder]:
    """The folder at `path`, for files of these names; made if it is not there, and tried: a model is not
    measured for an hour to find that nothing can be written. What is incomplete goes when the block ends, and
    so does a folder that was made for nothing, with its parents. Raises OutputError."""
    made = [each for each in (path, *path.parents) if not each.exists()]
    folder = Folder(path, secrets.token_hex(4))
    try:  # from the first folder on: a signal may come between any two of these lines
        folder.try_out(names)
        yield folder
    finally:
        for left in path.glob(f".*.{folder.beside}"):
            left.unlink(missing_ok=True)
        for each in made:
            if each.is_dir() and not any(each.iterdir()):
                each.rmdir()


def _failed(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path}: cannot be written to: {error.strerror or error}; name a folder that can, with --out",
        expected="a folder that can be written to",
        got=error.strerror,
    )
