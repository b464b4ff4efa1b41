"""The tuner of the real FlashInfer, on a CPU: its contexts do what backends/flashinfer_tuning.py says.

A runner of no kernel stands for the GEMM, and measuring is answered with fixed times; looking up, storing and
the scope of the contexts are FlashInfer's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.backends.flashinfer_tuning import FlashInferTuner

pytestmark = [
    pytest.mark.flashinfer,
    pytest.mark.skipif(
        find_spec("flashinfer") is None, reason="FlashInfer is not installed: ./dev test-flashinfer"
    ),
]

BUCKETS = (1, 8, 100)
TIMES = {-1: 3.0, 0: 2.0, 1: 1.0}  # milliseconds, by tactic
BEST = 1

Lookup = Callable[..., Any]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, str]]:
    """(M, under a CUDA graph, L2) of each measurement; the tuner forgets all when the test ends."""
    package.load()
    from flashinfer.autotuner import AutoTuner

    monkeypatch.setattr(AutoTuner, "_instance", None)
    tuner, calls = AutoTuner.get(), []

    def profile(runner: Any, tensors: list[Any], tactic: int, config: Any, **options: Any) -> float:
        calls.append((len(tensors[0]), config.use_cuda_graph, config.l2_cache_policy))
        return TIMES[tactic]

    monkeypatch.setattr(tuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return calls


@pytest.fixture
def lookup(measured: object) -> Lookup:
    """The tactic for a GEMM of M rows, as mm_mxfp8 asks for it."""
    from flashinfer.autotuner import AutoTuner, TunableRunner
    from flashinfer.gemm.gemm_base import _MM_MXFP8_TUNING_CONFIG as CONFIG

    class Runner(TunableRunner):  # type: ignore[misc]
        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[int]:
            return [0, 1]

        def get_cache_key_extras(self, inputs: Any) -> tuple[bool, ...]:
            return (True,)

        def forward(self, inputs: Any, tactic: int = -1, **options: Any) -> Any:
            return inputs[5]

    def find(m: int, n: int = 128, k: int = 256) -> Any:
        scales = (
            torch.zeros(128 * (k // 32), dtype=torch.uint8),
            torch.zeros(n * (k // 32), dtype=torch.uint8),
        )
        tensors = [torch.zeros(m, k), torch.zeros(k, n), *scales, torch.bfloat16, torch.zeros(m, n)]
        return AutoTuner.get().choose_one("mxfp8_gemm", [Runner()], CONFIG, [*tensors, torch.zeros(4)])[1]

    return find


def test_one_forward_tunes_every_bucket_as_it_will_be_served(
    lookup: Lookup, measured: list[tuple[int, bool, str]], tmp_path: Path
) -> None:
    """Guards: an M that is tuned under another size, an eager timing, a warm L2."""
    with FlashInferTuner(tmp_path, BUCKETS).tuning():
        assert lookup(8) == BEST
    assert sorted(set(measured)) == [(m, True, "cold") for m in BUCKETS]
    assert len(list(tmp_path.rglob("entries/*.json"))) == len(BUCKETS)


def test_what_was_tuned_is_served_in_a_later_process(
    lookup: Lookup, measured: list[tuple[int, bool, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an identity that differs between tuning and serving, or from start to start."""
    from flashinfer.autotuner import AutoTuner

    with FlashInferTuner(tmp_path, BUCKETS).tuning():
        lookup(8)
    monkeypatch.setattr(AutoTuner, "_instance", None)  # a process that knows nothing yet
    measured.clear()
    with FlashInferTuner(tmp_path, BUCKETS).serving():
        assert [lookup(m) for m in BUCKETS] == [BEST] * len(BUCKETS)
    assert measured == []


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "memory"])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (128, 512)], ids=["another-n", "another-k"])
def test_what_was_not_tuned_raises(
    lookup: Lookup, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: bool, n: int, k: int
) -> None:
    """Guards: a silent tactic -1."""
    tuner = FlashInferTuner(tmp_path if folder else None, BUCKETS)
    with tuner.tuning():
        lookup(8)
    with pytest.raises(RuntimeError, match="strict replay miss"), tuner.serving():
        lookup(8, n, k)
    assert "FlashInfer has no tuned tactic for mxfp8_gemm" in caplog.text


def test_outside_the_contexts_nothing_of_it_is_seen(lookup: Lookup, tmp_path: Path) -> None:
    with FlashInferTuner(tmp_path, BUCKETS).tuning():
        lookup(8)
    assert lookup(8) == -1


def test_the_contexts_do_not_nest(tmp_path: Path, measured: object) -> None:
    tuner = FlashInferTuner(tmp_path, BUCKETS)
    for outer, inner in ((tuner.tuning, tuner.serving), (tuner.serving, tuner.tuning)):
        with outer(), pytest.raises(RuntimeError, match=r"nested|while tuning"), inner():
            pass


def on_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


def test_serving_is_for_its_thread_alone(lookup: Lookup, tmp_path: Path) -> None:
    """Guards: a context entered where the server starts, while the device thread runs on untuned."""
    tuner = FlashInferTuner(tmp_path, BUCKETS)
    with tuner.tuning():
        lookup(8)
    with tuner.serving():
        assert on_another_thread(lambda: lookup(8)) == -1


def test_while_one_thread_tunes_the_others_do_too(
    lookup: Lookup, measured: list[tuple[int, bool, str]], tmp_path: Path
) -> None:
    """Guards: a release in which a second device thread would become possible, or this one slower."""
    with FlashInferTuner(tmp_path, BUCKETS).tuning():
        on_another_thread(lambda: lookup(8, n=512))
    assert (8, False, "hot") in measured
