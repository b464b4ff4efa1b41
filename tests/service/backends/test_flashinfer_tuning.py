"""FlashInfer's tuner: what is asked of it, and what becomes of a lookup that finds nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemmwire_service.backends.flashinfer_tuning import FlashInferTuner


@dataclass
class Report:
    """Stands for ReplayCoverage."""

    max_records: int
    records: list[dict[str, Any]] = field(default_factory=list)
    misses: int = 0
    dropped_records: int = 0


class Library:
    """Stands for flashinfer: notes the contexts that are entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, dict[str, Any]]] = []
        self.left = 0

    @contextmanager
    def autotune_v2(self, mode: str, **options: Any) -> Iterator[None]:
        self.entered.append((mode, options))
        try:
            yield
        finally:
            self.left += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    module = SimpleNamespace(
        autotune_v2=library.autotune_v2,
        ReplayCoverage=Report,
        MeasurementPolicy=lambda **policy: policy,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return library


def record(status: str, tactic: str = "3", reasons: tuple[str, ...] = ()) -> dict[str, Any]:
    shapes = ((8, 256), (256, 128))
    return {
        "op": "mxfp8_gemm",
        "input_shapes": shapes,
        "status": status,
        "selected_tactic": tactic,
        "reasons": reasons,
    }


def test_both_contexts_mean_one_store_and_one_policy(library: Library) -> None:
    """Guards: tuning under one identity and serving under another, where nothing is ever found."""
    tuner = FlashInferTuner(Path("cache"), (1, 8, 100))
    with tuner.tuning():
        pass
    with tuner.serving():
        pass
    (tune, tuned), (replay, served) = library.entered
    assert (tune, replay) == ("tune", "replay")
    assert served.pop("strict_replay") is True
    served.pop("replay_report")
    assert served == tuned
    assert tuned == {
        "persistent_cache": True,
        "cache_root": Path("cache/flashinfer"),
        "measurement_policy": {"execution_mode": "cuda_graph", "cold_l2": True},
        "cache_scope": "context",
        "tuning_buckets": (1, 8, 100),
        "round_up": True,
    }


def test_without_a_folder_nothing_is_written(library: Library) -> None:
    """Guards: FlashInfer's default folder in place of none."""
    with FlashInferTuner(None, (8,)).tuning():
        pass
    [(_, options)] = library.entered
    assert (options["persistent_cache"], options["cache_root"]) == (False, None)


def test_a_miss_is_an_error_in_the_log_even_where_it_is_caught(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a bucket that falls to another plan or backend without a word of why."""
    with FlashInferTuner(None, (8,)).serving():
        report = library.entered[0][1]["replay_report"]
        report.records = [record("hit"), record("miss", "-1", ("not_found",))]
        report.misses = 1
    [said] = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert "no tuned tactic for mxfp8_gemm ((8, 256), (256, 128)) (not_found)" in said.getMessage()


def test_misses_beyond_the_report_are_counted(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    with FlashInferTuner(None, (8,)).serving():
        report = library.entered[0][1]["replay_report"]
        report.misses, report.dropped_records = 2000, 976
    assert "2000 lookups without a tuned tactic in all" in caplog.text


def test_a_default_that_won_is_told_apart_from_a_miss(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with FlashInferTuner(None, (8,)).serving():
        library.entered[0][1]["replay_report"].records = [record("hit", "-1")]
    [said] = caplog.records
    assert (said.levelno, "default tactic was the fastest" in said.getMessage()) == (logging.INFO, True)


@pytest.mark.parametrize("context", ["tuning", "serving"])
def test_an_exception_leaves_the_context(library: Library, context: str) -> None:
    """Guards: a tuner that stays on, or a context that cannot be entered again, after one bad kernel."""
    with pytest.raises(ZeroDivisionError), getattr(FlashInferTuner(None, (8,)), context)():
        raise ZeroDivisionError
    assert library.left == 1
