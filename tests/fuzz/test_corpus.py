"""What fuzzing found, and where it begins, as plain tests."""

from __future__ import annotations

from typing import Any

import pytest

from fuzz.target import CORPUS, Target
from fuzz.targets import TARGETS


def inputs() -> list[Any]:
    return [
        pytest.param(target, data, id=f"{target.name}-{name}")
        for target in TARGETS.values()
        for name, data in {**target.seeds, **target.corpus()}.items()
    ]


@pytest.mark.parametrize(("target", "data"), inputs())
def test_an_input_is_answered_or_refused_within_its_memory(target: Target, data: bytes) -> None:
    target.run(data)  # what is imported and remembered is not of the input
    target.bounded(data)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_part_of_a_seed_is_answered_or_refused(target: Target) -> None:
    """Guards: a message or file that ends early, at any byte."""
    for seed in target.seeds.values():
        step = max(1, len(seed) // 200)
        for end in range(0, len(seed), step):
            target.run(seed[:end])


def test_the_corpus_is_of_targets_that_there_are() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(TARGETS)


def test_a_table_that_doubles_once_is_not_of_the_input() -> None:
    """Guards: a finding of 3.8 MB on 77 bytes, which happened to fill the table of interned strings."""
    tables: list[bytearray] = []

    def run(data: bytes) -> None:
        if not tables:
            tables.append(bytearray(4 << 20))

    Target("once", run, {}).bounded(b"{}")


def test_memory_that_an_input_takes_each_time_is_a_finding() -> None:
    with pytest.raises(AssertionError, match="each: 2 bytes took 41943"):
        Target("each", lambda data: bytearray(4 << 20).clear(), {}).bounded(b"{}")
