"""FlashInfer's own tuner, which chooses a kernel (a tactic) for each shape of `mm_mxfp8`.

Outside its contexts a shape that was never tuned runs tactic -1, whatever that is, and only a log may tell.
So plans are tuned in `tuning`, and run or captured in `serving`, where such a shape raises. What 0.7.4 does:

* The contexts (`autotune_v2`) are kept per thread, and one does not nest in another. They have to be entered
  on the device thread, around the forwards. Replaying a CUDA graph looks nothing up and needs neither.
* One part of `tuning` is the process's: while it is open, other threads' forwards tune too, into other
  stores. Hence one device thread.
* The store is chosen by folder, versions, GPU and measurement policy. Both contexts must name the same
  policy, or `serving` finds nothing. With `cache_scope="context"` the rest of the process does not see it.
* A process reads the store once. Entries are written one file each, by renaming; a damaged one is a miss.
* With `tuning_buckets`, one forward of any M tunes every bucket of its N, K and layout; with `round_up`, an M
  of the ladder is looked up as itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmwire_service.backends.flashinfer_package import load

log = logging.getLogger("gemmwire.flashinfer")

_RECORDS = 1024  # lookups that the report of a context keeps in full
_UNTUNED = "-1"


@dataclass(frozen=True)
class FlashInferTuner:
    """Both contexts for one folder (None: in memory) and one ladder of buckets."""

    folder: Path | None
    buckets: tuple[int, ...]

    def tuning(self) -> AbstractContextManager[None]:
        return tuning(self.folder, self.buckets)

    def serving(self) -> AbstractContextManager[None]:
        return serving(self.folder, self.buckets)


@contextmanager
def tuning(cache_dir: Path | None, buckets: Sequence[int]) -> Iterator[None]:
    """Forwards of this thread tune what the store lacks, under graph replay with a cold L2, and store it.

    Never around a capture: FlashInfer refuses to measure in one.
    """
    flashinfer = load()
    with flashinfer.autotune_v2(mode="tune", **_options(flashinfer, cache_dir, buckets)):
        yield


@contextmanager
def serving(cache_dir: Path | None, buckets: Sequence[int]) -> Iterator[None]:
    """Forwards and captures of this thread use what was tuned; one that was not raises RuntimeError.

    When the context ends, the log has an error for each such lookup, also where somebody caught the
    exception.
    """
    flashinfer = load()
    report = flashinfer.ReplayCoverage(max_records=_RECORDS)
    options = _options(flashinfer, cache_dir, buckets)
    try:
        with flashinfer.autotune_v2(mode="replay", replay_report=report, strict_replay=True, **options):
            yield
    finally:
        _tell(report)


def _options(flashinfer: Any, cache_dir: Path | None, buckets: Sequence[int]) -> dict[str, Any]:
    return {
        "persistent_cache": cache_dir is not None,
        "cache_root": cache_dir / "flashinfer" if cache_dir is not None else None,
        "measurement_policy": flashinfer.MeasurementPolicy(execution_mode="cuda_graph", cold_l2=True),
        "cache_scope": "context",
        "tuning_buckets": tuple(buckets),
        "round_up": True,
    }


def _tell(report: Any) -> None:
    for record in report.records:
        what = f"{record['op']} {record['input_shapes']}"
        if record["status"] == "miss":
            log.error(
                "FlashInfer has no tuned tactic for %s (%s); it was not run",
                what,
                ", ".join(record["reasons"]),
            )
        elif record["selected_tactic"] == _UNTUNED:
            log.info("FlashInfer's default tactic was the fastest for %s", what)
    if report.dropped_records and report.misses:
        log.error("FlashInfer: %d lookups without a tuned tactic in all", report.misses)
