"""Threads for the cores that there are, and not for those of others."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gemmwire_service.cores import cores, share


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "200000 100000"}, 2.0),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.max": "what is this"}, math.inf),
        ({}, math.inf),
    ],
)
def test_a_container_has_the_cores_that_it_is_given(
    files: dict[str, str], expected: float, tmp_path: Path
) -> None:
    """Guards: 63 threads in a container of two cores, which stands still for most of the time."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert share(tmp_path) == expected


def test_a_quota_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for quota, expected in ((math.inf, 64), (2.0, 2), (1.5, 2), (0.5, 1)):
        monkeypatch.setattr("gemmwire_service.cores.share", lambda group, quota=quota: quota)
        assert cores() == expected
