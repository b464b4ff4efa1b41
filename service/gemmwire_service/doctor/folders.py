"""Whether a folder can be written, without making it."""

from __future__ import annotations

import tempfile
from pathlib import Path

_TRIAL = 4096  # bytes: a full disk still takes an empty file


def unwritable(folder: Path) -> str | None:
    """Why `folder`, or the folder it would be made in, cannot be written; None where it can."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(_TRIAL))
            file.flush()
    except OSError as error:
        return f"{existing} cannot be written: {error.strerror or error}"
    return None
