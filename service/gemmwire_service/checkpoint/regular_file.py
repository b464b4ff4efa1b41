"""A file of a checkpoint, opened for reading."""

from __future__ import annotations

import stat
from io import FileIO
from pathlib import Path

from gemmwire_service.errors import CheckpointError


def open_regular(path: Path) -> FileIO:
    """`path` for reading, unbuffered. Only a regular file: opening a pipe would wait for its writer.

    Raises CheckpointError.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a regular file; put the file itself there, or a link to it")
        return FileIO(path, "rb")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file", expected="a file", got="nothing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror or error}") from None
