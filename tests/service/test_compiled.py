"""The functions in C: where their libraries come from, and when they are not used."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gemmwire_service import compiled
from gemmwire_service.compiled import LEVELS, NotCompiled
from gemmwire_service.mxfp8 import fake
from gemmwire_service.mxfp8.fake import _Native, round_by_operators
from gemmwire_service.mxfp8.fake_cpu import Quantize, fake_cpu
from gemmwire_service.mxfp8.few_rows import FewRows, few_rows
from oracle import assert_same_bits, rounded_once, sparse

rounding = importlib.import_module("gemmwire_service.mxfp8.fake_cpu")
pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, compiled.COMPILERS)), reason="there is no C compiler here"
)

SHORT_WAY = pytest.mark.skipif(
    not {"avx512bw", "avx512vl"} <= set(compiled._flags().split()), reason="no instructions for it here"
)


@pytest.fixture
def x() -> torch.Tensor:
    bits = torch.randint(-0x8000, 0x8000, (5, 96), generator=torch.Generator().manual_seed(3))
    return bits.to(torch.int16).view(torch.bfloat16)


@pytest.fixture(autouse=True)
def _nothing_baked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_baked", lambda source: None)


def assert_rounds(quantize: Quantize, x: torch.Tensor) -> None:
    out, expected = torch.empty_like(x), torch.empty_like(x)
    quantize(x, out)
    round_by_operators(x, expected)
    same = (out.view(torch.int16) == expected.view(torch.int16)) | (out.isnan() & expected.isnan())
    assert same.all(), f"first at {(~same).nonzero()[0].tolist()}"


@pytest.mark.parametrize("edge", [False, True], ids=["normal", "below"])
@pytest.mark.parametrize("zeros", [0, 7, 31])
def test_blocks_of_normal_numbers_and_zeros(tmp_path: Path, zeros: int, edge: bool) -> None:
    """Guards: the short way that such a block goes, up to the least number that is subnormal and may not."""
    generator = torch.Generator().manual_seed(zeros)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    largest = draw(15 << 7, 0x7F80, 4096, 1)
    least = ((largest + 31 - (8 << 7)) & 0x7F80) - (6 << 7)  # in the block's scale
    bits = least + draw(0, 1 << 15, 4096, 32) % (largest + 1 - least)
    bits[:, :zeros] = 0
    bits[:, 31:] = largest
    if edge:
        bits[:, 30:31] = least - 1
    bits = bits[:, torch.randperm(32, generator=generator)] | draw(0, 2, 4096, 32) << 15
    assert_rounds(fake_cpu(tmp_path), bits.to(torch.int16).view(torch.bfloat16).view(-1, 256))


def test_it_is_compiled_once_for_a_folder(
    tmp_path: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: every start that waits for a compiler."""
    folder = tmp_path / "new" / "cache"
    assert_rounds(fake_cpu(folder), x)
    (made,) = folder.iterdir()
    monkeypatch.setenv("CC", "false")  # would fail
    assert_rounds(fake_cpu(folder), x)
    assert list(folder.iterdir()) == [made]


@pytest.mark.parametrize("changed", ["FAKE_CPU", "OPTIONS", "_flags"])
def test_another_source_option_or_processor_is_another_file(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: the library of an older version, or of another machine with the same home."""
    fake_cpu(tmp_path)
    source = tmp_path / "changed" / "fake_cpu.c"
    source.parent.mkdir()
    source.write_text(compiled.FAKE_CPU.read_text() + "\n")
    values = {"FAKE_CPU": source, "OPTIONS": (*compiled.OPTIONS, "-g0"), "_flags": lambda: "another"}
    module = rounding if changed == "FAKE_CPU" else compiled
    monkeypatch.setattr(module, changed, values[changed])
    fake_cpu(tmp_path)
    assert len(list(tmp_path.glob("fake_cpu-*.so"))) == 2


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a read-only container that quantizes slowly, or does not start."""
    file = tmp_path / "file"
    file.touch()
    assert_rounds(fake_cpu(file / "cache"), x)
    assert_rounds(fake_cpu(None), x)


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_can_change_is_not_run(what: str, tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a library that another user of the machine has put into a shared folder."""
    fake_cpu(tmp_path / "first")  # for its name; a path that is loaded is not read again
    (made,) = (tmp_path / "first").iterdir()
    planted = tmp_path / made.name
    planted.write_bytes(b"not a library, and never loaded")
    changed = tmp_path if what == "folder" else planted
    changed.chmod(stat.S_IMODE(changed.stat().st_mode) | stat.S_IWOTH)
    assert_rounds(fake_cpu(tmp_path), x)


@pytest.mark.parametrize("compiler", ["cc", "false"])
def test_a_file_that_is_no_library_is_told_with_its_name_and_done_without(
    compiler: str,
    tmp_path: Path,
    x: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards: slow forwards for as long as a damaged file, or a file system that runs nothing, is there."""
    fake_cpu(tmp_path / "first")  # for its name; a path that is loaded is not read again
    (made,) = (tmp_path / "first").iterdir()
    (tmp_path / made.name).write_bytes(b"damaged")
    if compiler == "false":
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(NotCompiled, match=r"false fails on fake_cpu\.c"):
            fake_cpu(tmp_path)
    else:
        assert_rounds(fake_cpu(tmp_path), x)
    assert f"{made.name} cannot be loaded" in caplog.text


@pytest.mark.parametrize("folder", [".", "cache"])
def test_a_folder_may_be_named_from_where_the_server_starts(
    folder: str, tmp_path: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: --cache-dir . , a name without a slash, which the loader seeks among the system's libraries."""
    monkeypatch.chdir(tmp_path)
    assert_rounds(fake_cpu(Path(folder)), x)


def test_it_is_kept_whatever_the_umask_lets_a_group_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    """Guards: a compiler at every start of users whose files their own group may write."""
    before = os.umask(0o002)
    try:
        fake_cpu(tmp_path / "cache")
    finally:
        os.umask(before)
    monkeypatch.setenv("CC", "false")  # would fail
    assert_rounds(fake_cpu(tmp_path / "cache"), x)


def test_what_others_could_replace_is_not_run_nor_written(
    tmp_path: Path, x: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a folder that is exchanged between the look at it and the loading, and another user's file that
    is overwritten at every start."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for folder in (shared, shared / "cache"):
        assert_rounds(fake_cpu(folder), x)
    assert not list(shared.rglob("*.so"))
    assert "fake_cpu.c is compiled anew at each start: others than its owner can change" in caplog.text


def test_a_link_in_the_place_of_a_library_is_replaced(tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a library that lies where others can change it."""
    fake_cpu(tmp_path / "first")
    (made,) = (tmp_path / "first").iterdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"not a library, and never loaded")
    (tmp_path / made.name).symlink_to(elsewhere)
    assert_rounds(fake_cpu(tmp_path), x)
    assert not (tmp_path / made.name).is_symlink()


def test_a_processor_that_is_not_known_gets_what_any_of_its_like_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: torch.Tensor
) -> None:
    """Guards: an illegal instruction on another machine with the same home, where Linux lists no flags."""
    calls: list[Sequence[Sequence[str]]] = []
    real = compiled._compile

    def noting(source: Path, path: Path, processors: Sequence[Sequence[str]]) -> None:
        calls.append(processors)
        real(source, path, processors)

    monkeypatch.setattr(compiled, "_compile", noting)
    monkeypatch.setattr(compiled, "_flags", lambda: "")
    assert_rounds(fake_cpu(tmp_path), x)
    assert calls == [((),)]


@pytest.mark.parametrize("option", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_no_option_of_the_compiler_makes_small_numbers_zero(option: str, tmp_path: Path) -> None:
    """Guards: a library that has the thread that loads it flush what is below 2^-126, torch's results too."""
    code = (
        "import torch; from gemmwire_service.mxfp8.fake_cpu import fake_cpu; fake_cpu(None); "
        "assert (torch.tensor([1e-39]) * 1.0).item() != 0"
    )
    cc = f"{shutil.which('gcc') or 'cc'} {option}"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"CC": cc}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_what_a_compiler_says_may_be_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a server that does not start, for a message that is not UTF-8."""
    compiler = tmp_path / "cc"
    compiler.write_bytes(b"#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NotCompiled, match="fails on fake_cpu\\.c: caf\ufffd"):
        fake_cpu(None)


def test_a_compiler_that_makes_nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "true")
    with pytest.raises(NotCompiled, match=r"true fails on fake_cpu\.c: it made no library"):
        fake_cpu(tmp_path)


@pytest.mark.parametrize(("of_x", "of_out"), [("meta", "meta"), ("cpu", "meta"), ("meta", "cpu")])
def test_only_memory_of_the_cpu_is_read_and_written(of_x: str, of_out: str) -> None:
    """Guards: an address of another device, at which the process ends."""
    code = (
        "import torch; from gemmwire_service.mxfp8.fake import fake_quantize\n"
        "def of(device): return torch.zeros(2, 64, dtype=torch.bfloat16, device=device)\n"
        f"try: fake_quantize(of({of_x!r}), of({of_out!r}))\n"
        "except (RuntimeError, NotImplementedError): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


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


def test_a_folder_that_cannot_keep_it_is_named(
    x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a --cache-dir that is of no use, which only a slower start tells of."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(fake, "_native", _Native(tmp_path / "file" / "folder"))
    with caplog.at_level(logging.WARNING, "gemmwire.mxfp8"):
        assert_rounds(fake.fake_quantize, x)
    (record,) = caplog.records
    assert f"it cannot be kept in {tmp_path / 'file' / 'folder'} (" in record.getMessage()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(31 << 16)", "(32 << 16)"),
        ("scaled > 0.015625f ? scaled : 0.015625f", "scaled"),
        ("1048576.0f", "524288.0f"),
        ("0x8000u", "0u"),
        pytest.param("_set1_epi16(7)", "_set1_epi16(8)", marks=SHORT_WAY),
        pytest.param("- (6 << 7)", "- (7 << 7)", marks=SHORT_WAY),
        pytest.param("(short)0x8000", "0", marks=SHORT_WAY),
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
    text = compiled.FAKE_CPU.read_text()
    assert right in text
    source = tmp_path / "fake_cpu.c"
    source.write_text(text.replace(right, wrong))
    monkeypatch.setattr(rounding, "FAKE_CPU", source)
    monkeypatch.setattr(fake, "_native", _Native(tmp_path))
    with caplog.at_level(logging.ERROR, "gemmwire.mxfp8"):
        assert_rounds(fake.fake_quantize, x)
    assert "gives other bits" in caplog.text


def test_one_beside_the_source_is_taken_for_processors_that_have_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an illegal instruction on an older processor, and the slower level on a newer one."""
    monkeypatch.undo()
    source = tmp_path / "fake_cpu.c"
    source.write_text("int one = 1;\n")
    for level in LEVELS:
        compiled._beside(source, level).touch()
    for level, (needed, _) in LEVELS.items():
        monkeypatch.setattr(compiled, "_flags", lambda needed=needed: " ".join(needed))
        assert compiled._baked(source) == compiled._beside(source, level)
    monkeypatch.setattr(compiled, "_flags", lambda: "sse2")
    assert compiled._baked(source) is None


def test_one_beside_an_earlier_version_of_the_source_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a package that was upgraded in an image, whose functions are called with other arguments."""
    monkeypatch.undo()
    source = tmp_path / "fake_cpu.c"
    source.write_text("int one = 1;\n")
    monkeypatch.setattr(compiled, "_flags", lambda: " ".join(LEVELS["x86-64-v3"][0]))
    compiled._beside(source, "x86-64-v3").touch()
    assert compiled._baked(source) is not None
    source.write_text("int two = 2;\n")
    assert compiled._baked(source) is None


def test_it_refuses_what_it_would_read_or_write_beyond(tmp_path: Path) -> None:
    """Guards: memory beyond a tensor's end, which C does not check."""
    quantize = fake_cpu(tmp_path)
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    for x, out in ((rows[:, :33], rows[:, :33]), (rows, rows[:1]), (rows, rows[:, :32])):
        with pytest.raises(ValueError, match="multiple of 32"):
            quantize(x, out)


def test_two_that_compile_at_once_leave_one_whole_library(tmp_path: Path, x: torch.Tensor) -> None:
    """Guards: a library of one process that another is still writing."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        for quantize in pool.map(lambda _: fake_cpu(tmp_path), range(4)):
            assert_rounds(quantize, x)
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]
    assert os.access(next(tmp_path.iterdir()), os.R_OK)


# --- the matmul for few rows ---


def multiplier(folder: Path) -> FewRows:
    found = few_rows(folder)
    if found is None:
        pytest.skip("this processor does not multiply BF16")
    return found


@pytest.mark.parametrize("k", [32, 64, 1056])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 127, 130])
def test_few_rows_are_multiplied_exactly(n: int, k: int, tmp_path: Path) -> None:
    """Guards: the last rows of W, which are fewer than a tile has; a row of x that another's sum goes to."""
    few = multiplier(tmp_path)
    for m in range(1, few.most + 1):
        generator = torch.Generator().manual_seed(m)
        x, w = (sparse(each, k, generator).to(torch.bfloat16) for each in (m, n))
        around = torch.full((m + 2, n), 7.0, dtype=torch.bfloat16)
        few.multiply(x, w, around[1:-1])
        assert_same_bits(around[1:-1], rounded_once(x.double() @ w.double().T))
        assert (around[[0, -1]] == 7.0).all()


def test_a_row_that_is_not_finite_stays_alone(tmp_path: Path) -> None:
    """Guards: a NaN that rounds to an infinity or to a number, and one that reaches another row."""
    few = multiplier(tmp_path)
    x, w = torch.ones(few.most, 64), torch.ones(5, 64)
    x[0, 3], x[1, 5], x[2, 7] = float("nan"), float("inf"), float("-inf")
    out = torch.empty(few.most, 5, dtype=torch.bfloat16)
    few.multiply(x.to(torch.bfloat16), w.to(torch.bfloat16), out)
    assert out[0].isnan().all()
    assert out[1].isposinf().all()
    assert out[2].isneginf().all()
    assert (out[3:] == 64).all()


@pytest.mark.parametrize("seed", range(20))
def test_it_rounds_to_nearest_and_ties_to_even(seed: int, tmp_path: Path) -> None:
    """Guards: a sum that is cut, for every BF16 neighbour and the ties between them."""
    few = multiplier(tmp_path)
    generator = torch.Generator().manual_seed(seed)
    # 1 * a + 1 * b, where b is a half, a little less or a little more of a's last place.
    a = torch.randint(0x80, 0x100, (64,), generator=generator).double()
    part = torch.tensor([0.5, 0.25, 0.75, -0.5]).double().repeat(16)
    w = torch.zeros(64, 32, dtype=torch.float64)
    w[:, 0], w[:, 9] = a, part
    out = torch.empty(1, 64, dtype=torch.bfloat16)
    few.multiply(torch.ones(1, 32, dtype=torch.bfloat16), w.to(torch.bfloat16), out)
    assert_same_bits(out[0], rounded_once(a + part))


def test_sizes_that_it_would_read_beyond_are_refused(tmp_path: Path) -> None:
    few = multiplier(tmp_path)
    x, w = torch.zeros(few.most + 1, 64).to(torch.bfloat16), torch.zeros(8, 64).to(torch.bfloat16)
    for rows, matrix, n in ((x, w, 8), (x[:0], w, 8), (x[:1], w[:, :32], 8), (x[:1], w, 7)):
        with pytest.raises(ValueError, match="W "):
            few.multiply(rows, matrix, torch.empty(len(rows), n, dtype=torch.bfloat16))


def test_one_of_other_bits_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    multiplier(tmp_path)
    source = tmp_path / "few_rows.c"
    text = compiled.FEW_ROWS.read_text()
    source.write_text(text.replace("set1_epi32(0x7FFF)", "set1_epi32(0x8000)"))
    monkeypatch.setattr("gemmwire_service.mxfp8.few_rows.FEW_ROWS", source)
    monkeypatch.setattr(fake, "_native", _Native(tmp_path))
    with caplog.at_level(logging.WARNING, "gemmwire.mxfp8"):
        assert fake.few_rows_here() is None
    assert "other bits" in caplog.text
