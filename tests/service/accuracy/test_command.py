"""gemmwire-serve accuracy, from a checkpoint to a report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.__main__ import main
from gemmwire_service.accuracy import command
from gemmwire_service.accuracy.source import Source, SourceLayer
from gemmwire_service.progress import Progress
from oracle import spread

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
GLASSLLM = "glassllm"


def run(*arguments: object) -> int:
    return main(["accuracy", *map(str, arguments)])


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "accuracy.json").read_text())
    return found


def checkpoint(folder: Path, tensors: dict[str, Tensor], name: str = "model") -> Path:
    path = folder / f"{name}.safetensors"
    save_file(tensors, path)
    return path


def floats(count: int = 3, n: int = 64, k: int = 96) -> dict[str, Tensor]:
    return {f"layers.{i}.up.weight": spread(n, k, seed=i).bfloat16() for i in range(count)}


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- what it says ---


def test_every_layer_of_a_real_model_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("glassllm")
    assert run(GLASSLLM, "--out", tmp_path / "report") == 0
    found = report(tmp_path / "report")
    assert len(found["layers"]) == 29
    assert found["summary"] == {"fine": 29, "look": 0, "keep": 0}
    for layer in found["layers"]:
        assert 31 < layer["weight"]["sqnr_db"] < 32, layer["name"]
        assert sum(layer["weight"]["exponents"].values()) == layer["n"] * -(-layer["k"] // 32)
        assert all(0.03 < each["relative_error"] < 0.05 for each in layer["outputs"].values())
    printed = capsys.readouterr()
    assert "blocks.0.attn.W_K" in printed.out
    assert "29 layers: 29 fine, 0 look, 0 keep in BF16" in printed.out
    assert "report/accuracy.html" in printed.err


def test_the_order_and_the_numbers_are_the_same_at_every_run(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, floats())
    for name in ("a", "b"):
        assert run(source, "--out", tmp_path / name) == 0
    first, second = (report(tmp_path / name) for name in ("a", "b"))
    assert first == second
    assert [layer["name"] for layer in first["layers"]] == [f"layers.{i}.up" for i in range(3)]


def test_the_figures_of_a_layer_do_not_depend_on_which_others_are_measured(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, floats())
    assert run(source, "--out", tmp_path / "all") == 0
    assert run(source, "--layers", "*.1.*", "--layers", "layers.2.up", "--out", tmp_path / "some") == 0
    assert report(tmp_path / "some")["layers"] == report(tmp_path / "all")["layers"][1:]


def test_json_goes_to_stdout_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a program that reads it and finds a table, a progress bar or a path in it."""
    source = checkpoint(tmp_path, floats(1))
    assert run(source, "--json", "--rows", 3, "--seed", 7) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["seed"], len(found["layers"])) == (3, 7, 1)
    assert found["layers"][0]["outputs"]["gaussian"]["rows"] == 3


def test_captured_rows_are_measured_and_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 0] = 0
    x = torch.ones(5, 64)
    x[:, 0] = 2.0**19  # takes the bits of its neighbours, and the weight does not look at it
    source = checkpoint(tmp_path, {"up.weight": weight, "down.weight": weight + 0})
    rows = checkpoint(tmp_path, {"up": x, "other": x + 0}, "x")
    assert run(source, "--calibrate", rows, "--out", tmp_path / "report") == 0
    up, down = (report(tmp_path / "report")["layers"][i] for i in (0, 1))
    up, down = (up, down) if up["name"] == "up" else (down, up)
    assert (up["verdict"], up["outputs"]["captured"]["rows"]) == ("keep", 5)
    assert up["outputs"]["captured"]["x"]["flushed"] == pytest.approx(31 / 64)
    assert (down["verdict"], "captured" in down["outputs"]) == ("fine", False)
    printed = capsys.readouterr()
    assert "'other'" in printed.err
    assert "'down'" in printed.err
    assert "keep in BF16" in printed.out


def test_the_worst_rows_are_named_by_their_place_in_the_file(tmp_path: Path) -> None:
    """Guards: the place among those that were taken of it."""
    x = torch.ones(10, 64)
    x[9, 1] = 1.0625 * 2.0**-12
    x[9, 0] = 448.0 * 2.0**-12
    x[9, 2:] = 0
    source = checkpoint(tmp_path, {"up.weight": torch.eye(64)})
    rows = checkpoint(tmp_path, {"up": x}, "x")
    assert run(source, "--calibrate", rows, "--rows", 2, "--out", tmp_path / "report") == 0
    (layer,) = report(tmp_path / "report")["layers"]
    assert [row["row"] for row in layer["outputs"]["captured"]["worst_rows"]] == [9]


def test_nothing_over_nothing_is_in_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All zeros, one number, one row of zeros, N = K = 1: numbers all, or null, and valid JSON."""
    half = torch.ones(4, 33)
    half[1] = 0
    tensors = {
        "zeros": torch.zeros(3, 40),
        "one": torch.full((2, 64), 0.3),
        "half": half,
        "tiny": torch.ones(1, 1),
    }
    source = checkpoint(tmp_path, {f"{name}.weight": each for name, each in tensors.items()})
    assert run(source, "--json", "--rows", 2) == 0
    text = capsys.readouterr().out
    found = {layer["name"]: layer for layer in json.loads(text, parse_constant=refuse)["layers"]}
    assert found["zeros"]["weight"]["sqnr_db"] is None
    assert found["zeros"]["weight"]["zero_rows"] == 3
    assert found["half"]["weight"]["zero_rows"] == 1
    assert found["one"]["weight"]["kurtosis"] is None
    assert found["tiny"]["weight"]["relative_error"] == 0
    assert found["zeros"]["verdict"] == "fine"


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- MXFP8 sources ---


@pytest.mark.parametrize("fixture", ["modelopt", "compressed-tensors", "vendor"])
def test_a_checkpoint_of_mxfp8_alone_has_nothing_to_be_held_against(
    fixture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(FIXTURES / fixture, "--layers", "*_proj")
    said = capsys.readouterr().err
    assert status == 2
    assert "--reference MODEL" in said
    assert "MXFP8" in said


def test_a_checkpoint_of_mxfp8_is_measured_against_the_model_that_it_was_made_from(tmp_path: Path) -> None:
    """What ModelOpt wrote is what is made here at load, so the figures are equal."""
    assert run(FIXTURES / "bf16", "--out", tmp_path / "ours") == 0
    assert run(FIXTURES / "modelopt", "--reference", FIXTURES / "bf16", "--out", tmp_path / "theirs") == 0
    ours = {layer["name"]: layer for layer in report(tmp_path / "ours")["layers"]}
    theirs = report(tmp_path / "theirs")["layers"]
    assert theirs
    assert theirs == [ours[layer["name"]] for layer in theirs]


def test_a_reference_of_other_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = checkpoint(tmp_path, floats(1))
    assert run(FIXTURES / "modelopt", "--layers", "*_proj", "--reference", other) == 2
    assert "the model that the checkpoint was made from" in capsys.readouterr().err


# --- exit status and refusals ---


@pytest.mark.parametrize(
    ("bound", "fine", "bad"), [((), 0, 0), (("--fail-on", "look"), 0, 1), (("--fail-on", "keep"), 0, 1)]
)
def test_the_status_says_whether_a_layer_is_bad(
    tmp_path: Path, bound: tuple[str, ...], fine: int, bad: int
) -> None:
    weight = torch.ones(64, 64)
    weight[:, 1:] = 2.0**-24  # beside 1, all of them become zero
    good = checkpoint(tmp_path, floats(1), "good")
    poor = checkpoint(tmp_path, {**floats(1), "poor.weight": weight}, "poor")
    assert (run(good, *bound), run(poor, *bound)) == (fine, bad)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--rows", "0"), id="no-rows"),
        pytest.param(("--rows", "-1"), id="negative"),
        pytest.param(("--rows", "16385"), id="more-rows-than-fit"),
        pytest.param(("--out", ""), id="no-folder"),
        pytest.param(("--calibrate", ""), id="no-file"),
        pytest.param(("--seed", "x"), id="no-number"),
        pytest.param(("--fail-on", "fine"), id="fail-on-fine"),
        pytest.param(("--calib", "x"), id="abbreviated"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(checkpoint(tmp_path, floats(1)), *arguments)
    assert ended.value.code == 2


def test_a_pattern_of_no_layer_is_refused_with_those_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint(tmp_path, floats(2)), "--layers", "*.down") == 2
    said = capsys.readouterr().err
    assert "'*.down'" in said
    assert "'layers.1.up'" in said


def test_nowhere_to_write_is_found_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an hour's measuring for nothing."""
    monkeypatch.setattr(command, "measure", refuse)
    (tmp_path / "file").write_text("mine")
    source = checkpoint(tmp_path, floats(1))
    for folder in (tmp_path / "file", tmp_path / "file" / "report"):
        assert run(source, "--out", folder) == 2
        assert "--out" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_in_the_place_of_the_page_is_found_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: the new accuracy.json beside no page, under an error that says that nothing was written."""
    (tmp_path / "report" / "accuracy.html").mkdir(parents=True)
    assert run(checkpoint(tmp_path, floats(1)), "--out", tmp_path / "report") == 2
    assert "accuracy.html: cannot be written to: Is a directory" in capsys.readouterr().err
    assert entries(tmp_path / "report") == ["accuracy.html"]


def test_an_earlier_report_stays_whole_where_the_next_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: half a report, or the page of one run beside the numbers of another."""
    folder = tmp_path / "report"
    source = checkpoint(tmp_path, floats())
    assert run(source, "--out", folder) == 0
    before = {name: (folder / name).read_bytes() for name in entries(folder)}
    broken = floats()
    broken["layers.2.up.weight"][5, 6] = torch.nan
    assert run(checkpoint(tmp_path, broken, "broken"), "--out", folder) == 2
    assert "[5, 6]" in capsys.readouterr().err
    assert {name: (folder / name).read_bytes() for name in entries(folder)} == before


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, {"up.weight": torch.full((4, 32), torch.nan)})
    (tmp_path / "there").mkdir()
    for folder in ("report", "made/for/nothing", "there", "there/report"):
        assert run(source, "--out", tmp_path / folder) == 2
        assert entries(tmp_path) == ["model.safetensors", "there"]
    assert entries(tmp_path / "there") == []


def test_what_else_is_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    source = checkpoint(tmp_path, floats(1))
    for _ in range(2):
        assert run(source, "--out", tmp_path) == 0
        assert entries(tmp_path) == ["accuracy.html", "accuracy.json", "model.safetensors", "notes.txt"]


@pytest.mark.slow
def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, floats(64, 256, 512))
    made = tmp_path / "report"
    process = subprocess.Popen(
        [sys.executable, "-m", "gemmwire_service", "accuracy", str(source), "--out", str(made)],
        stdout=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not made.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert entries(tmp_path) == ["model.safetensors"]


# --- streaming ---


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: weights that stay with their figures: a model that has to fit into memory to be measured."""
    alive: list[list[bool]] = []
    seen: list[weakref.ref[Tensor]] = []
    read = Source.read

    def watched(self: Source, name: str) -> SourceLayer:
        alive.append([ref() is not None for ref in seen])
        layer = read(self, name)
        seen.extend([weakref.ref(layer.weight), weakref.ref(layer.mx.codes)])
        return layer

    monkeypatch.setattr(Source, "read", watched)
    assert run(checkpoint(tmp_path, floats(6)), "--rows", 2) == 0
    assert len(alive) == 6
    assert not any(any(each) for each in alive)


def test_progress_counts_every_layer_and_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    totals: list[tuple[int, int]] = []

    class Told(Progress):
        def __init__(self, what: str, nbytes: int, layers: int) -> None:
            totals.append((nbytes, layers))
            super().__init__(what, nbytes, layers)

        def add(self, name: str, nbytes: int, layers: int = 0) -> None:
            told.append((name, nbytes, layers))

    monkeypatch.setattr(command, "Progress", Told)
    assert run(checkpoint(tmp_path, floats(3)), "--rows", 1) == 0
    assert totals == [(3 * 64 * 96 * 2, 3)]
    assert told == [(f"layers.{i}.up", 64 * 96 * 2, 1) for i in range(3)]
