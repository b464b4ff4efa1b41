"""The store of measured plans: what it keeps, and that nothing on a disk can stop a server."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmwire_service import plans
from gemmwire_service.backends.base import Plan
from gemmwire_service.cache import cache_folder
from gemmwire_service.plans import Environment, Measured, PlanKey, PlanStore
from source_tree import ROOT

HERE = Environment("NVIDIA B200", "10.0", "2.13.0", "13.0", "0.7.4", "0.7.4", "0.1.0")
KEY = PlanKey("flashinfer_trtllm", 256, 512, 8)
MEASURED = Measured(Plan(8, "8x4", "cute-dsl"), 12.5)


def filled(folder: Path) -> Path:
    """A folder with one plan in it -> its file."""
    store = PlanStore(folder, HERE)
    store.put(KEY, MEASURED)
    assert store.path is not None
    return store.path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_plan_is_found_by_the_next_process(tmp_path: Path) -> None:
    """Guards: a start that measures again what was measured."""
    filled(tmp_path / "not" / "yet" / "there")
    assert PlanStore(tmp_path / "not" / "yet" / "there", HERE).get(KEY) == MEASURED


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, backend="cublas"),
        replace(KEY, n_pad=384),
        replace(KEY, k_pad=768),
        replace(KEY, bucket=16),
    ],
    ids=["backend", "n", "k", "bucket"],
)
def test_a_plan_is_that_of_its_key_alone(tmp_path: Path, other: PlanKey) -> None:
    filled(tmp_path)
    assert PlanStore(tmp_path, HERE).get(other) is None


@pytest.mark.parametrize("field", list(Environment.__dataclass_fields__))
def test_another_environment_sees_none_of_it_and_changes_nothing(tmp_path: Path, field: str) -> None:
    """Guards: a plan that another GPU or package version measured, and two servers that undo each other."""
    path = filled(tmp_path)
    text = path.read_text()
    other = PlanStore(tmp_path, replace(HERE, **{field: "other"}))
    assert other.get(KEY) is None
    other.put(KEY, Measured(Plan(8, "128x4"), 1.0))
    assert path.read_text() == text


def edited(**changes: Any) -> bytes:
    """A file of one plan with some of its fields changed, at any depth."""

    def change(value: Any) -> Any:
        if isinstance(value, list):
            return [change(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: changes.get(name, change(item)) for name, item in value.items()}

    whole = json.loads(plans._encode({KEY: MEASURED}, HERE))
    return json.dumps(change(whole)).encode()


WHOLE = plans._encode({KEY: MEASURED}, HERE).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(b"", "", id="empty"),
        pytest.param(WHOLE[:-40], "", id="truncated"),
        pytest.param(b"\x00" * 400, "", id="zeros"),
        pytest.param(b"\xff\xfe{}", "", id="not-utf8"),
        pytest.param(b"[" * 100_000, "", id="deep"),
        pytest.param(b"[]", "", id="a-list"),
        pytest.param(b"{}", "", id="an-empty-object"),
        pytest.param(edited(format=2), "its format is 2, this version reads 1", id="another-format"),
        pytest.param(edited(gpu="NVIDIA B300"), "measured on another GPU", id="another-environment"),
        pytest.param(edited(plans={}), "", id="plans-an-object"),
        pytest.param(edited(bucket="8"), "bucket is '8'", id="bucket-a-text"),
        pytest.param(edited(n_pad=256.0), "n_pad is 256.0", id="n-a-float"),
        pytest.param(edited(layout=4), "layout is 4", id="layout-a-number"),
        pytest.param(edited(plan={"bucket": 16}), "bucket 16 is kept for bucket 8", id="of-another-bucket"),
        pytest.param(edited(plan={"bucket": 8, "tactic": 3}), "tactic", id="unknown-field"),
        pytest.param(edited(microseconds=float("nan")), "microseconds are nan", id="nan-microseconds"),
        pytest.param(edited(microseconds=10**400), "too large", id="endless-microseconds"),
        pytest.param(edited(microseconds=None), "microseconds are None", id="no-microseconds"),
    ],
)
def test_a_damaged_or_foreign_file_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes, why: str
) -> None:
    """Guards: a crash at start, a file that is used although it is wrong, one that is lost without a word."""
    path = filled(tmp_path)
    path.write_bytes(text)
    store = PlanStore(tmp_path, HERE)
    assert store.get(KEY) is None
    aside = Path(f"{path}.set-aside")
    assert aside.read_bytes() == text
    [said] = warnings_of(caplog)
    assert str(path) in said
    assert str(aside) in said
    assert why in said
    store.put(KEY, MEASURED)
    assert PlanStore(tmp_path, HERE).get(KEY) == MEASURED


def test_what_another_process_wrote_meanwhile_is_kept(tmp_path: Path) -> None:
    """Guards: the last of several servers erasing what the others measured."""
    ours, theirs = PlanStore(tmp_path, HERE), PlanStore(tmp_path, HERE)
    other = replace(KEY, bucket=16)
    assert ours.get(KEY) is None
    assert theirs.get(KEY) is None
    ours.put(KEY, MEASURED)
    theirs.put(other, Measured(Plan(16), 1.0))
    ours.put(KEY, MEASURED)
    later = PlanStore(tmp_path, HERE)
    assert (later.get(KEY), later.get(other)) == (MEASURED, Measured(Plan(16), 1.0))
    assert ours.get(other) == Measured(Plan(16), 1.0)


WRITER = """
import sys
from pathlib import Path
from gemmwire_service.backends.base import Plan
from gemmwire_service.plans import Environment, Measured, PlanKey, PlanStore

store = PlanStore(Path(sys.argv[1]), Environment(*"gctufbw"))
for bucket in range(1, 41):
    store.put(PlanKey(sys.argv[2], 128, 256, bucket), Measured(Plan(bucket), float(bucket)))
"""


def test_processes_that_write_at_once_do_not_damage_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: interleaved writes, a reader that sees half a file, temporary files left behind."""
    environment = Environment(*"gctufbw")
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "service"))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), f"backend-{number}"],
            env={**os.environ, "PYTHONPATH": paths},
        )
        for number in range(2)
    ]
    while any(writer.poll() is None for writer in writers):
        PlanStore(tmp_path, environment).get(PlanKey("backend-0", 128, 256, 1))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    assert warnings_of(caplog) == []
    assert [path.name for path in tmp_path.iterdir()] == [environment.file_name]
    store = PlanStore(tmp_path, environment)
    last = [store.get(PlanKey(f"backend-{number}", 128, 256, 40)) for number in range(2)]
    assert Measured(Plan(40), 40.0) in last  # whoever wrote last knew all of its own


def test_others_may_read_the_file(tmp_path: Path) -> None:
    """Guards: an image whose files only the user who built it can read."""
    before = os.umask(0o022)
    try:
        assert stat.S_IMODE(filled(tmp_path).stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=lambda number: errno.errorcode[number]
)
def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    """Guards: a server that does not start on a read-only or full disk, a warning for each bucket."""

    def fail(*paths: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "replace", fail)
    store = PlanStore(tmp_path, HERE)
    for bucket in (8, 16):
        store.put(replace(KEY, bucket=bucket), Measured(Plan(bucket), 1.0))
    assert store.get(replace(KEY, bucket=16)) == Measured(Plan(16), 1.0)
    [said] = warnings_of(caplog)
    assert os.strerror(error) in said
    assert "--cache-dir" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = PlanStore(tmp_path / "file" / "folder", HERE)
    for _ in range(2):
        store.put(KEY, MEASURED)
    assert store.get(KEY) == MEASURED
    assert len(warnings_of(caplog)) == 1


def test_a_file_that_cannot_be_read_is_said_once_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / HERE.file_name
    path.mkdir()
    store = PlanStore(tmp_path, HERE)
    store.put(KEY, MEASURED)
    assert store.get(KEY) == MEASURED
    assert len(warnings_of(caplog)) == 1
    assert path.is_dir()


def test_a_damaged_file_that_cannot_be_moved_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    path.write_bytes(b"{")

    def fail(*paths: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "replace", fail)
    store = PlanStore(tmp_path, HERE)
    assert store.get(KEY) is None
    store.put(KEY, MEASURED)
    assert path.read_bytes() == b"{"
    assert len(warnings_of(caplog)) == 1


def test_without_a_folder_it_keeps_plans_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    store = PlanStore(None, HERE)
    store.put(KEY, MEASURED)
    assert store.get(KEY) == MEASURED
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("setting", "environ", "folder"),
    [
        pytest.param("auto", {}, "{home}/.cache/gemmwire", id="home"),
        pytest.param("auto", {"XDG_CACHE_HOME": "/c"}, "/c/gemmwire", id="xdg"),
        pytest.param("auto", {"XDG_CACHE_HOME": "c"}, "{home}/.cache/gemmwire", id="xdg-relative"),
        pytest.param("auto", {"XDG_CACHE_HOME": ""}, "{home}/.cache/gemmwire", id="xdg-empty"),
        pytest.param("/d", {"XDG_CACHE_HOME": "/c"}, "/d", id="named"),
        pytest.param("~/d", {}, "{home}/d", id="tilde"),
    ],
)
def test_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, environ: dict[str, str], folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(setting, environ) == Path(folder.format(home=tmp_path))


def test_a_user_without_a_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a container that runs as a number of no user, and does not start."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder("auto", {}) is None


def test_the_environment_of_a_cpu_names_what_is_installed() -> None:
    here = Environment.of(torch.device("cpu"))
    assert (here.gpu, here.capability, here.pytorch) == ("cpu", "none", torch.__version__)
    assert here.file_name.startswith("plans-cpu-")
