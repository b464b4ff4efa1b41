"""docs/scaling.md says what its arithmetic says, from what README.md measured."""

from __future__ import annotations

import pytest

from scaling_table import (
    LINK,
    MXFP8,
    PAGE,
    SERVED_BY_GPU,
    Traffic,
    forwards,
    renewed,
    replicas,
    served_by_cpu,
)


def test_the_tables_are_current() -> None:
    """Guards: a README that was measured anew, and a page of the old figures."""
    page = PAGE.read_text()
    assert renewed(page) == page, "run ./dev python tests/scaling_table.py"


def test_the_measurements_are_found() -> None:
    """Guards: the test above, passing because the reader of README.md found nothing."""
    assert set(SERVED_BY_GPU) <= set(forwards())
    assert list(served_by_cpu()) == [1, 16, 256]
    assert min(served_by_cpu().values()) > 0


def test_the_larger_way_is_the_line() -> None:
    """By hand: 4096 rows of 4096 in BF16 are 32 MiB, of which 100 Gb/s carry 351 a second."""
    square = Traffic(4096, 4096, 4096)
    assert square.there == square.back == 512 + 2**25
    assert square.per_link == pytest.approx(LINK / (512 + 2**25))
    assert round(square.per_link) == 351
    wide = Traffic(4096, 14336, 4096, MXFP8)
    assert wide.there == 512 + 4096 * 4096 * 33 / 32
    assert wide.per_link == LINK / wide.back


def test_replicas_are_counted_by_requests_where_those_are_small() -> None:
    assert replicas(Traffic(1, 4096, 4096)) == 81  # 1352083 / 16760, up
    assert replicas(Traffic(4096, 4096, 4096)) == 5  # 351 / 75, up
