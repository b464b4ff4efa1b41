"""The folder for what is worth keeping from one start to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

AUTO = "auto"


def cache_folder(setting: str = AUTO, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `cache_dir` names; auto is $XDG_CACHE_HOME/gemmwire, else ~/.cache/gemmwire.

    None where there is no home to put it in, as for a user that the system does not know.
    """
    try:
        if setting != AUTO:
            return Path(setting).expanduser()
        base = environ.get("XDG_CACHE_HOME", "")
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gemmwire"
    except RuntimeError:
        return None
