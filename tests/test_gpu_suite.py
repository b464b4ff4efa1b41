"""The GPU suite on a machine that has none: that its tests would run, and what its report tells of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from source_tree import ROOT

WITHOUT_THE_SERVER = """
import sys
for name in ("fastapi", "pydantic", "pydantic_settings", "uvicorn", "safetensors", "glassllm"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
# One kernel stands for the others, and the largest shapes are left out: the simulator is slow.
REHEARSED = "trtllm and not 2112x1536 and not bucket512 or k1536 or m9 or batch_invariant_rows"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sm100_tests_run_where_only_torch_and_pytest_are() -> None:
    """Guards: tests that nobody here can run, and that fail for themselves on the machine they are for."""
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "sm100", "-k", REHEARSED, "tests/gpu"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_SERVER, *arguments],
        cwd=ROOT,
        env={**os.environ, "REHEARSE_SM100": "1", "PYTHONPATH": "client:service"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 35, done.stdout


GOOD = """
def test_passes(request):
    request.node.user_properties.append(("sm100", "yes"))
"""
MIXED = """
import pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "the kernel is off"
def test_is_skipped(): pytest.skip("needs a CUDA device")
"""
CRASHES = """
import os, signal
def test_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
"""


def reported(folder: Path, **sources: str) -> tuple[int, str]:
    """The exit status and the report of a suite of these files."""
    for name, source in sources.items():
        lines = ["import pytest", "pytestmark = pytest.mark.sm100", source]
        (folder / f"test_{name}.py").write_text("\n".join(lines))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = sm100: a\n")
    output = folder / "report.md"
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "report.py")]
    done = subprocess.run(
        [*command, "--tests", str(folder), "--output", str(output)], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, output.read_text()


def test_a_run_that_passed_is_one_on_sm100(tmp_path: Path) -> None:
    status, text = reported(tmp_path, good=GOOD)
    assert status == 0
    assert ": passed\n" in text
    assert "1 passed, 0 failed, 0 skipped (1 passed on SM100 kernels)" in text


def test_a_run_in_which_all_was_skipped_has_not_passed(tmp_path: Path) -> None:
    """Guards: a green report from a machine that tested nothing."""
    status, text = reported(tmp_path, skips="def test_skips(): pytest.skip('no FlashInfer here')")
    assert status == 1
    assert ": not passed\n" in text
    assert "no SM100 kernel was tested" in text
    assert "* 1: no FlashInfer here" in text


def test_failures_come_with_the_command_that_reproduces_them(tmp_path: Path) -> None:
    status, text = reported(tmp_path, good=GOOD, mixed=MIXED)
    assert status == 1
    assert "2 passed, 1 failed, 1 skipped" in text
    assert re.search(r"`PYTHONPATH=client:service \S+ -m pytest '\S+test_mixed.py::test_fails'`", text)
    assert "the kernel is off" in text


def test_a_crash_is_told_and_the_other_files_are_run(tmp_path: Path) -> None:
    """Guards: an illegal access that takes the report with it."""
    status, text = reported(tmp_path, crashes=CRASHES, good=GOOD)
    assert status == 1
    assert "ended with SIGSEGV" in text
    assert "(1 passed on SM100 kernels); 1 files did not come to their end" in text


def test_the_report_holds_what_a_reader_asks_for(tmp_path: Path) -> None:
    text = reported(tmp_path, good=GOOD)[1]
    for part in ('"backends": [', "## nvidia-smi", "## Packages", "torch==", "commit "):
        assert part in text
