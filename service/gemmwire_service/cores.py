"""The cores that this process may compute on."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """At least one. A container that is given two of many is stopped for most of each tenth of a second in
    which it uses more, so that its share counts."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(usable, share(CGROUP))))


def share(group: Path) -> float:
    """Cores' worth of time of a control group, by version 2 or 1; infinite where it is not bounded."""
    try:
        if (file := group / "cpu.max").is_file():
            most, period = file.read_text().split()
        else:
            files = (group / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            most, period = (file.read_text() for file in files)
        return int(most) / int(period) if int(most) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # "max", or no such thing
        return math.inf
