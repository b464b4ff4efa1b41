"""The check command: its exit status, its JSON, its table, and that it needs nothing of the server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gemmwire_service import __main__ as entry
from gemmwire_service.backends import BACKENDS, PRIORITY
from gemmwire_service.backends.base import Plan
from gemmwire_service.doctor import command
from gemmwire_service.doctor.command import main
from gemmwire_service.doctor.host import Fact
from gemmwire_service.doctor.report import Report
from gemmwire_service.doctor.trial import Trial
from scripted_backend import ScriptedBackend
from source_tree import ROOT

CPU = ["--device", "cpu"]


def doubled(plan: Plan, out: Tensor) -> None:
    out *= 2


@pytest.mark.parametrize("choice", ["auto", "emulation", "cublas,emulation"])
def test_status_0_where_the_chosen_one_works(capsys: pytest.CaptureFixture[str], choice: str) -> None:
    assert main([*CPU, "--backend", choice], {}) == 0
    assert f"{choice} chooses emulation, which works" in capsys.readouterr().out


def test_status_1_where_none_can(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a healthy emulation that hides that the backend asked for does not run."""
    assert main([*CPU, "--backend", "cublas"], {}) == 1
    assert "cublas chooses none: layer 'check'" in capsys.readouterr().out


def test_status_1_where_the_chosen_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BACKENDS, "scripted", lambda: ScriptedBackend(fault=doubled))
    assert main([*CPU, "--backend", "scripted"], {}) == 1
    assert "scripted chooses scripted, which does not work here" in capsys.readouterr().out


def test_status_1_where_the_device_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda:97"], {}) == 1
    assert "auto chooses none: there is no cuda:97" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--backend", "flashinfer"], "'flashinfer' is none of auto, flashinfer_trtllm"),
        (["--backend", ""], "'' is none of auto"),
        (["--device", "tpu"], "'tpu' is none of auto, cpu, cuda and cuda:INDEX"),
        (["--jsn"], "--jsn"),
        (["more"], "more"),
    ],
    ids=str,
)
def test_status_2_for_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments, {})
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_variables_of_the_server_are_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a check that finds another backend than the server in the same container would take."""
    assert main([], {"GEMMWIRE_BACKEND": "cublas", "GEMMWIRE_DEVICE": "cpu"}) == 1
    assert "cublas chooses none" in capsys.readouterr().out


def test_whatever_fails_there_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no such file")

    monkeypatch.setattr(command, "facts", broken)
    assert main(CPU, {}) == 1
    assert capsys.readouterr() == ("", "gemmwire-serve check: OSError: no such file\n")


def test_the_json_has_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a script that reads it and breaks with the next release."""
    assert main([*CPU, "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ["format", "ok", "device", "asked", "chosen", "problem", "layer", "facts", "backends"]
    assert list(found) == keys
    assert (found["format"], found["ok"], found["device"]) == (1, True, "cpu")
    assert (found["asked"], found["chosen"], found["problem"]) == ("auto", "emulation", None)
    assert found["layer"] == {"n": 130, "k": 384, "bias": True, "rows": [1, 7, 9]}
    assert found["facts"]["torch"] == {"value": torch.__version__, "lacks": None}
    assert [backend["name"] for backend in found["backends"]] == list(PRIORITY)
    for backend in found["backends"]:
        assert list(backend) == ["name", "status", "reason", "error", "microseconds"]
    last = found["backends"][-1]
    assert (last["status"], last["reason"], sorted(last["microseconds"])) == ("works", None, ["1", "7", "9"])
    assert found["backends"][0]["status"] == "passed_over"
    assert found["backends"][0]["reason"]


def test_a_backend_beside_the_order_is_tried_where_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    main([*CPU, "--json", "--backend", "flashinfer_batch_invariant,emulation"], {})
    found = json.loads(capsys.readouterr().out)
    assert [backend["name"] for backend in found["backends"]] == [*PRIORITY, "flashinfer_batch_invariant"]


REPORT = Report(
    device="cuda:0",
    asked="auto",
    facts=(Fact("gpu0", "NVIDIA B200"), Fact("nvcc", None, "not in PATH")),
    backends=(
        Trial("flashinfer_trtllm", "works", None, 0.0012, {"1": 9.5, "7": 10.25, "9": 11.0}),
        Trial("cublas", "fails", "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"),
        Trial("emulation", "passed_over", "not here"),
    ),
    chosen="flashinfer_trtllm",
    problem=None,
)


def test_the_table() -> None:
    assert REPORT.text(colour=False).splitlines() == [
        "Host",
        "  gpu0  NVIDIA B200",
        "  nvcc  none (not in PATH)",
        "",
        "Backends on cuda:0, with a layer of N=130, K=384 and a bias",
        "                                  error            M=1         M=7         M=9",
        "  flashinfer_trtllm  works        0.0012        9.5 us     10.2 us     11.0 us",
        "  cublas             fails        RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED",
        "  emulation          passed over  not here",
        "",
        "auto chooses flashinfer_trtllm, which works",
    ]


def test_colour_changes_nothing_but_colour() -> None:
    coloured = REPORT.text(colour=True)
    plain = coloured
    for code in ("\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[0m"):
        assert code in coloured
        plain = plain.replace(code, "")
    assert plain == REPORT.text(colour=False)


@pytest.mark.parametrize(
    ("terminal", "environ", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
    ],
    ids=["terminal", "pipe", "no-color", "dumb"],
)
def test_colour_is_for_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    environ: dict[str, str],
    coloured: bool,
) -> None:
    """Guards: escape codes in the file that is attached to a report."""
    monkeypatch.setattr(command, "examine", lambda choice, device: REPORT)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    main([], environ)
    assert ("\x1b[" in capsys.readouterr().out) is coloured


# Reached from the command line.

WITHOUT_THE_SERVER = """
import sys
for name in ("fastapi", "pydantic", "pydantic_settings", "uvicorn", "flashinfer"):
    sys.modules[name] = None
from gemmwire_service.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("client", "service"))
    command = [sys.executable, "-c", WITHOUT_THE_SERVER, *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_it_works_without_the_packages_of_the_server() -> None:
    """Guards: a check that needs what it is to say is missing."""
    done = run("check", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "auto chooses emulation" in done.stdout


def test_serving_without_them_says_what_to_install() -> None:
    done = run("serve")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "gemmwire[service]" in done.stderr


@pytest.mark.parametrize(
    ("given", "name", "rest"),
    [
        ([], "serve", []),
        (["--port", "1"], "serve", ["--port", "1"]),
        (["serve", "--port", "1"], "serve", ["--port", "1"]),
        (["check", "--json"], "check", ["--json"]),
        (["--model", "check"], "serve", ["--model", "check"]),
    ],
    ids=str,
)
def test_the_first_argument_may_name_the_command(
    monkeypatch: pytest.MonkeyPatch, given: list[str], name: str, rest: list[str]
) -> None:
    called: list[tuple[str, list[str]]] = []

    def stand_in(command: str) -> entry.Command:
        def note(arguments: Sequence[str]) -> int:
            called.append((command, list(arguments)))
            return 0

        return note

    monkeypatch.setattr(
        entry, "COMMANDS", {command: lambda command=command: stand_in(command) for command in entry.COMMANDS}
    )
    assert entry.main(given) == 0
    assert called == [(name, rest)]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quantise", "there are serve, check, quantize, accuracy, key; did you mean quantize?"),
        (
            "path/to/model",
            "there is no command 'path/to/model'; .*; to serve a checkpoint, say --model path/to/model",
        ),
    ],
)
def test_a_first_argument_that_names_none_is_refused(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a screen of the server's options for a command that is misspelt."""
    assert entry.main([name, "a", "b"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(says, line)
