"""The one place that rounds M."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmwire_service.buckets import Ladder
from gemmwire_service.errors import SettingsError
from source_tree import SERVICE, modules

ladders = st.sets(st.integers(1, 5000), min_size=1, max_size=12).map(lambda s: Ladder(tuple(sorted(s))))


def test_default_ladder() -> None:
    """Guards: a first bucket above 1, which makes a single row pay for many."""
    assert Ladder().buckets == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize(
    ("largest", "buckets"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (100, (1, 2, 4, 8, 16, 32, 64, 100))],
)
def test_up_to_ends_at_the_size_asked_for(largest: int, buckets: tuple[int, ...]) -> None:
    """Guards: a largest forward above what the user allowed, or below it."""
    assert Ladder.up_to(largest).buckets == buckets


@pytest.mark.parametrize(
    ("m", "bucket"), [(1, 1), (2, 2), (3, 4), (7, 8), (8, 8), (9, 16), (129, 256), (300, 512), (4096, 4096)]
)
def test_bucket_for(m: int, bucket: int) -> None:
    """Guards: a bucket that does not hold the rows, or one larger than needed."""
    assert Ladder().bucket_for(m) == bucket


@settings(deadline=None)  # a shared machine may pause for longer than any
@given(ladders, st.data())
def test_a_bucket_holds_its_rows_and_is_its_own_bucket(ladder: Ladder, data: st.DataObject) -> None:
    """Guards: tuning that rounds up where running rounds down, for any m and any ladder."""
    m = data.draw(st.integers(1, ladder.largest))
    bucket = ladder.bucket_for(m)
    smaller = [size for size in ladder.buckets if size < bucket]
    assert m <= bucket
    assert all(size < m for size in smaller)
    assert ladder.bucket_for(bucket) == bucket


@settings(deadline=None)  # a shared machine may pause for longer than any
@given(ladders, st.integers(0, 20_000))
def test_chunks_add_up_and_each_fits(ladder: Ladder, m: int) -> None:
    """Guards: rows lost or answered twice above the largest bucket, and forwards of no row."""
    chunks = ladder.chunks(m)
    assert sum(chunks) == m
    assert all(1 <= rows <= ladder.largest for rows in chunks)
    assert all(rows == ladder.largest for rows in chunks[:-1])


@pytest.mark.parametrize("m", [0, -1, 4097])
def test_no_bucket_is_refused_with_the_limits(m: int) -> None:
    """Guards: a silent clamp of what fits no bucket."""
    with pytest.raises(ValueError, match=rf"no bucket holds {m} rows: they hold 1 to 4096"):
        Ladder().bucket_for(m)


def test_negative_rows_are_refused() -> None:
    """Guards: divmod answering a negative count with chunks."""
    with pytest.raises(ValueError, match="-1 rows"):
        Ladder().chunks(-1)


@pytest.mark.parametrize(
    "buckets", [(), (0, 1), (-1,), (1, 1), (4, 2)], ids=["empty", "zero", "negative", "twice", "falling"]
)
def test_a_ladder_that_is_none_is_refused(buckets: tuple[int, ...]) -> None:
    """Guards: a bisection over sizes that are not sorted, which picks a bucket too small."""
    with pytest.raises(SettingsError, match="no ladder"):
        Ladder(buckets)


@pytest.mark.parametrize("largest", [0, -1])
def test_no_ladder_ends_below_one(largest: int) -> None:
    """Guards: a server whose largest forward has no row."""
    with pytest.raises(SettingsError, match="no ladder"):
        Ladder.up_to(largest)


# What a second rounding of M would be written with; traffic.py sorts times into bounds by one of them.
ROUNDING = {"bit_length", "bisect", "bisect_left", "bisect_right", "next_power_of_2", "log2", "searchsorted"}


def test_m_is_rounded_here_and_nowhere_else() -> None:
    """Guards: a plan that is tuned at one size and applied at another, because two places round."""
    found = {
        path.name
        for path in modules(SERVICE)
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in ROUNDING)
        or (isinstance(node, ast.Name) and node.id in ROUNDING)
    }
    assert found == {"buckets.py", "traffic.py"}
