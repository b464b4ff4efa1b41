"""docker/cc, which stands for a C compiler: it hands out the one module that it has and compiles nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from source_tree import ROOT

SOURCE = "int made;\n"


@pytest.fixture
def cc(tmp_path: Path) -> Path:
    """The script in an environment where it finds a module."""
    for folder in ("bin", "lib/triton"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "lib" / "triton" / "driver.c").write_text(SOURCE)
    (tmp_path / "lib" / "triton" / "driver.so").write_bytes(b"\x7fELF")
    return Path(shutil.copy(ROOT / "docker" / "cc", tmp_path / "bin"))


def call(cc: Path, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """As Triton calls a compiler."""
    flags = ["-O3", "-shared", "-fPIC", "-Wno-psabi", "-o", str(target), "-l:libcuda.so.1", "-L/x", "-I/y"]
    return subprocess.run([cc, str(source), *flags], capture_output=True, text=True)


def test_the_module_that_was_made_is_handed_out(cc: Path, tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(SOURCE)
    done = call(cc, source, tmp_path / "cuda_utils.so")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "cuda_utils.so").read_bytes() == b"\x7fELF"


def test_another_source_is_refused(cc: Path, tmp_path: Path) -> None:
    """Guards: the module of one release of Triton loaded by another, which crashes."""
    source = tmp_path / "main.c"
    source.write_text(SOURCE + "int more;\n")
    done = call(cc, source, tmp_path / "cuda_utils.so")
    assert done.returncode == 1
    assert "this image has no compiler" in done.stderr
    assert not (tmp_path / "cuda_utils.so").exists()


@pytest.mark.parametrize("arguments", [[], ["--version"], ["main.c"]])
def test_anything_else_is_refused(cc: Path, arguments: list[str]) -> None:
    done = subprocess.run([cc, *arguments], capture_output=True, text=True)
    assert (done.returncode, "no compiler" in done.stderr) == (1, True)
