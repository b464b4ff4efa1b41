"""Whether a folder can be written: asked by writing, since permissions do not tell of a full disk."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from gemmwire_service.doctor.folders import unwritable


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    """Guards: a look at the host that changes it."""
    assert unwritable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reason = unwritable(tmp_path / "file" / "folder")
    assert reason is not None
    assert "file cannot be written: Not a directory" in reason


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=lambda n: errno.errorcode[n]
)
def test_what_the_system_says_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(**options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    assert unwritable(tmp_path) == f"{tmp_path} cannot be written: {os.strerror(number)}"
