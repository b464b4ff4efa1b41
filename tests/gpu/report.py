"""Run `gemmwire-serve check` and the tests of a folder on this GPU, and write one file to attach to a report.

Each test file has a process of its own, so that a kernel that ends its process ends only the tests after it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_A_TEST = 900  # FlashInfer may compile its kernels in the first
SECONDS_A_FILE = 3600
LINES = 60  # of a failure


@dataclass(frozen=True)
class Outcome:
    """One test: "passed", "failed" or "skipped", and the text that says why not the first."""

    node: str
    status: str
    text: str
    sm100: bool


@dataclass(frozen=True)
class FileRun:
    """One test file; `problem` is why its process did not come to its end, or None."""

    name: str
    outcomes: tuple[Outcome, ...]
    problem: str | None


@dataclass(frozen=True)
class Found:
    check: str
    check_ok: bool
    files: tuple[FileRun, ...]

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for file in self.files for outcome in file.outcomes]

    @property
    def sm100_passed(self) -> int:
        return sum(outcome.sm100 and outcome.status == "passed" for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        failed = any(outcome.status == "failed" for outcome in self.outcomes)
        stopped = any(file.problem for file in self.files)
        return self.check_ok and self.sm100_passed > 0 and not failed and not stopped


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 if the check and every test passed, at least one of them on an SM100 kernel; else 1."""
    parser = argparse.ArgumentParser(prog="./dev test-sm100", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "sm100-report.md", help="file to write")
    parser.add_argument("--tests", type=Path, default=Path(__file__).parent, help="folder of test files")
    options = parser.parse_args(arguments)
    files = sorted(options.tests.glob("test_*.py"))
    if not files:
        parser.error(f"{options.tests} holds no test_*.py")
    say("gemmwire-serve check, whose kernels may be compiled first, for minutes")
    check = run("-m", "gemmwire_service", "check", "--json")
    found = Found(check.stdout or check.stderr, check.returncode == 0, tuple(map(run_file, files)))
    text = report(found)
    options.output.write_text(text)
    say(f"{summary(found)}; the report is {options.output}")
    return 0 if found.ok else 1


def say(text: str) -> None:
    print(f"test-sm100: {text}", file=sys.stderr, flush=True)


def run(*arguments: str, timeout: float = SECONDS_A_FILE) -> subprocess.CompletedProcess[str]:
    """Python with the source tree in its path; a process that does not end in time has status 124."""
    paths = [str(ROOT / name) for name in ("client", "service")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {timeout:.0f} s")


# Running.


def run_file(path: Path) -> FileRun:
    name = os.path.relpath(path, ROOT)
    say(name)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        options = ["-m", "gpu or sm100", "-q", "-p", "no:cacheprovider", f"--timeout={SECONDS_A_TEST}"]
        done = run("-m", "pytest", name, *options, f"--junitxml={junit}")
        outcomes = tuple(read(junit, name)) if junit.exists() else ()
    return FileRun(name, outcomes, problem(done))


def problem(done: subprocess.CompletedProcess[str]) -> str | None:
    """pytest ends with 0 for passed, 1 for failed tests, 5 for none selected; anything else is its end."""
    if done.returncode in (0, 1, 5):
        return None
    status = f"status {done.returncode}"
    if done.returncode < 0:
        status = signal.Signals(-done.returncode).name
    return f"ended with {status}\n" + last_lines(done.stdout + done.stderr)


def read(junit: Path, name: str) -> Iterator[Outcome]:
    for case in ElementTree.parse(junit).iter("testcase"):
        status, text = "passed", ""
        for kind, means in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            element = case.find(kind)
            if element is not None:
                status, text = means, element.get("message", "") if means == "skipped" else element.text or ""
        sm100 = any(entry.get("name") == "sm100" for entry in case.iter("property"))
        yield Outcome(f"{name}::{case.get('name')}", status, text, sm100)


# Writing.


def summary(found: Found) -> str:
    counts = Counter(outcome.status for outcome in found.outcomes)
    told = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    stopped = sum(file.problem is not None for file in found.files)
    parts = [told + f" ({found.sm100_passed} passed on SM100 kernels)"]
    parts += [f"{stopped} files did not come to their end"] if stopped else []
    parts += [] if found.check_ok else ["the check found nothing that works"]
    parts += [] if found.sm100_passed else ["no SM100 kernel was tested"]
    return "; ".join(parts)


def report(found: Found) -> str:
    failed = [outcome for outcome in found.outcomes if outcome.status == "failed"]
    sections = [
        f"# gemmwire on {gpu(found.check)}: {'passed' if found.ok else 'not passed'}",
        summary(found),
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, {platform.platform()}, commit {commit()}",
        "## Tests\n\n" + table(found.files),
        *(f"### {file.name}\n{fenced(file.problem)}" for file in found.files if file.problem),
        *(failure(outcome) for outcome in failed),
        "## Skipped\n\n" + skipped(found.outcomes),
        "## Check\n" + fenced(found.check, "json"),
        "## nvidia-smi\n" + fenced(said_by("nvidia-smi")),
        "## Packages\n" + fenced(packages()),
    ]
    return "\n\n".join(sections) + "\n"


def gpu(check: str) -> str:
    try:
        facts = json.loads(check)["facts"]
        return str(next(fact["value"] for name, fact in facts.items() if name.startswith("gpu")) or "no GPU")
    except (ValueError, KeyError, TypeError, StopIteration):
        return "an unknown GPU"


def table(files: Sequence[FileRun]) -> str:
    lines = ["| file | passed | failed | skipped | |", "| --- | ---: | ---: | ---: | --- |"]
    for file in files:
        counts = Counter(outcome.status for outcome in file.outcomes)
        note = file.problem.splitlines()[0] if file.problem else ""
        numbers = " | ".join(str(counts[status]) for status in ("passed", "failed", "skipped"))
        lines.append(f"| {file.name} | {numbers} | {note} |")
    return "\n".join(lines)


def failure(outcome: Outcome) -> str:
    python = Path(sys.executable)
    shown = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    command = f"PYTHONPATH=client:service {shown} -m pytest '{outcome.node}'"
    return f"### {outcome.node}\n\nReproduce with `{command}`\n{fenced(last_lines(outcome.text))}"


def skipped(outcomes: Sequence[Outcome]) -> str:
    reasons = Counter(outcome.text for outcome in outcomes if outcome.status == "skipped")
    return "\n".join(f"* {count}: {reason}" for reason, count in reasons.most_common()) or "None."


def fenced(text: str, kind: str = "") -> str:
    return f"\n````{kind}\n{text.strip()}\n````"


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LINES:])


def said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def commit() -> str:
    changed = said_by("git", "status", "--porcelain", "--untracked-files=no")
    return said_by("git", "rev-parse", "HEAD") + (" with changes" if changed else "")


def packages() -> str:
    found = {f"{package.metadata['Name']}=={package.version}" for package in distributions()}
    return "\n".join(sorted(found, key=str.lower))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
