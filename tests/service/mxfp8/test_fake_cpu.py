"""The C function that quantizes x on a CPU: where it comes from, and when it is not used."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from gemmwire_service.mxfp8 import fake, fake_cpu
from gemmwire_service.mxfp8.fake import _Native, round_by_operators
from gemmwire_service.mxfp8.fake_cpu import LEVELS, NotCompiled, load

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, fake_cpu.COMPILERS)), reason="there is no C compiler here"
)


@pytest.fixture
def x() -> torch.Tensor:
    bits = torch.randint(-0x8000, 0x8000, (5, 96), generator=torch.Generator().manual_seed(3))
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.fixture(autouse=True)
def _nothing_baked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cpu, "_baked", lambda: None)


def assert_rounds(quantize: fake_cpu.Quantize, x: torch.Tensor) -> None:
    out, expected = torch.empty_like(x), torch.empty_like(x)
    quantize(x, out)
    round_by_operators(x, expected)
    same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
    assert same.all(), f"first at {(~same).nonzero()[0].tolist()}"


def test_it_is_compiled_once_for_a_folder(
    tmp_path: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: every start that waits for a compiler."""
    folder = tmp_path / "new" / "cache"
    assert_rounds(load(folder), x)
    (made,) = folder.iterdir()
    monkeypatch.setenv("CC", "false")  # would fail
    assert_rounds(load(folder), x)
    assert list(folder.iterdir()) == [made]


@pytest.mark.parametrize("changed", ["SOURCE", "OPTIONS", "_processor"])
def test_another_source_option_or_processor_is_another_file(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: the library of an older version, or of another machine with the same home."""
    load(tmp_path)
    source = tmp_path / "source.c"
    source.write_text(fake_cpu.SOURCE.read_text() + "\n")
    values = {"SOURCE": source, "OPTIONS": (*fake_cpu.OPTIONS, "-g0"), "_processor": lambda: "another"}
    monkeypatch.setattr(fake_cpu, changed, values[changed])
    load(tmp_path)
    assert len(list(tmp_path.glob("fake_cpu-*.so"))) == 2


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a read-only container that quantizes slowly, or does not start."""
    file = tmp_path / "file"
    file.touch()
    assert_rounds(load(file / "cache"), x)
    assert_rounds(load(None), x)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_change_is_not_run(what: str, tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a library that another user of the machine has put into a shared folder."""
    load(tmp_path / "first")  # for its name; a path that is loaded is not read again
    (made,) = (tmp_path / "first").iterdir()
    planted = tmp_path / made.name
    planted.write_bytes(b"not a library, and never loaded")
    changed = tmp_path if what == "folder" else planted
    changed.chmod(stat.S_IMODE(changed.stat().st_mode) | stat.S_IWOTH)
    assert_rounds(load(tmp_path), x)


def test_a_file_that_is_no_library_is_refused_with_its_name(tmp_path: Path) -> None:
    load(tmp_path / "first")  # for its name; a path that is loaded is not read again
    (made,) = (tmp_path / "first").iterdir()
    (tmp_path / made.name).write_bytes(b"damaged")
    with pytest.raises(NotCompiled, match=f"{made.name} cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "false fails on fake_cpu.c"),
        ("no-such-compiler", "CC names 'no-such-compiler', which is not there; install one"),
    ],
)
def test_without_a_compiler_torch_rounds_and_the_log_says_why(
    compiler: str,
    reason: str,
    x: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards: a slower path that nobody hears of."""
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(fake, "_native", _Native(None))
    with caplog.at_level(logging.WARNING, "gemmwire.mxfp8"):
        assert_rounds(fake.fake_quantize, x)
    (record,) = caplog.records
    assert reason in record.getMessage()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(31 << 16)", "(32 << 16)"),
        ("scaled > 0.015625f ? scaled : 0.015625f", "scaled"),
        ("1048576.0f", "524288.0f"),
        ("0x8000u", "0u"),
    ],
)
def test_a_function_of_other_bits_is_not_used(
    right: str,
    wrong: str,
    x: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards: a compiler, or an option in CC, that does not keep to IEEE arithmetic."""
    text = fake_cpu.SOURCE.read_text()
    assert right in text
    source = tmp_path / "fake_cpu.c"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(fake_cpu, "SOURCE", source)
    monkeypatch.setattr(fake, "_native", _Native(tmp_path))
    with caplog.at_level(logging.ERROR, "gemmwire.mxfp8"):
        assert_rounds(fake.fake_quantize, x)
    assert "gives other bits" in caplog.text


def test_one_beside_the_source_is_taken_for_processors_that_have_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an illegal instruction on an older processor, and the slower level on a newer one."""
    monkeypatch.undo()
    monkeypatch.setattr(fake_cpu, "SOURCE", tmp_path / "fake_cpu.c")
    for level in LEVELS:
        (tmp_path / f"fake_cpu-{level}.so").touch()
    found = {}
    for name, flags in {"new": LEVELS["x86-64-v4"] | LEVELS["x86-64-v3"], "old": LEVELS["x86-64-v3"]}.items():
        monkeypatch.setattr(fake_cpu, "_processor", lambda flags=flags: " ".join(flags))
        found[name] = fake_cpu._baked()
    assert found == {
        "new": tmp_path / "fake_cpu-x86-64-v4.so",
        "old": tmp_path / "fake_cpu-x86-64-v3.so",
    }
    monkeypatch.setattr(fake_cpu, "_processor", lambda: "sse2")
    assert fake_cpu._baked() is None


def test_it_refuses_what_it_would_read_or_write_beyond(tmp_path: Path) -> None:
    """Guards: memory beyond a tensor's end, which C does not check."""
    quantize = load(tmp_path)
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    for x, out in ((rows[:, :33], rows[:, :33]), (rows, rows[:1]), (rows, rows[:, :32])):
        with pytest.raises(ValueError, match="multiple of 32"):
            quantize(x, out)


def test_two_that_compile_at_once_leave_one_whole_library(tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a library of one process that another is still writing."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for quantize in pool.map(lambda _: load(tmp_path), range(4)):
            assert_rounds(quantize, x)
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    assert os.access(next(tmp_path.iterdir()), os.R_OK)
