"""./dev fuzz: every target under atheris, then the API, the engine and both paths, for some minutes.

  ./dev fuzz [--minutes M] [TARGET ...]

What atheris learns is kept in .fuzz/corpus and gone on from the next time. What it finds lies in .fuzz/found;
it belongs into tests/fuzz/corpus/TARGET as NAME.bin, NAME saying what it is, which the whole suite runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from fuzz.effort import FOLDER, VARIABLE, in_memory
from fuzz.target import CORPUS, Target
from fuzz.targets import TARGETS

KEPT = CORPUS.parents[2] / ".fuzz"
TESTS = {name: f"fuzz/test_{name}.py" for name in ("api", "engine", "paths", "repeats")}
_TESTS_SHARE = 0.4  # of the time, for all of them
_SLOWEST_S = 20  # of one input, before it counts as one that hangs
_LARGEST = 8192  # bytes of an input
_MEMORY = 3000  # MiB of a process
_NAMES = (*TARGETS, *TESTS)


def words(target: Target) -> Path:
    """libFuzzer's dictionary of a target."""
    path = KEPT / f"{target.name}.dict"
    path.write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words)
    )
    return path


def atheris(target: Target, seconds: float) -> int:
    learned, found = KEPT / "corpus" / target.name, KEPT / "found"
    for folder in (learned, found):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in {**target.seeds, **target.corpus()}.items():
        (learned / f"seed-{name}").write_bytes(data)
    flags = {
        "max_total_time": max(1, int(seconds)),
        "timeout": _SLOWEST_S,
        "rss_limit_mb": _MEMORY,
        "max_len": _LARGEST,
        "dict": words(target),
        "artifact_prefix": f"{found}/{target.name}-",
        "verbosity": 0,
    }
    command = [sys.executable, "-m", "fuzz.instrumented", target.name]
    command += [f"-{name}={value}" for name, value in flags.items()]
    with in_memory() as place:  # libFuzzer leaves without cleaning up
        return report(target.name, [*command, str(learned)], {FOLDER: place})


def tested(name: str, seconds: float) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-o", "timeout=0", TESTS[name]]
    return report(name, command, {VARIABLE: str(seconds)})


def report(name: str, command: Sequence[str], variables: dict[str, str]) -> int:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **variables}
    )
    if done.returncode:
        sys.stdout.write(done.stdout.decode(errors="replace"))
    print(f"fuzz: {name}: {'FOUND SOMETHING, see above' if done.returncode else 'nothing found'}", flush=True)
    return done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 where nothing was found."""
    parser = argparse.ArgumentParser(
        prog="dev fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of it together (default 60)")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(_NAMES)}; default: all")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.targets) - set(_NAMES))
    if unknown:
        parser.error(f"there is no target {', '.join(unknown)}; there are {', '.join(_NAMES)}")
    chosen = given.targets or _NAMES
    targets = [TARGETS[name] for name in chosen if name in TARGETS]
    if targets and find_spec("atheris") is None:
        print(f"fuzz: NOT RUN, atheris is not there for this Python: {', '.join(t.name for t in targets)}")
        targets = []
    tests = [name for name in chosen if name in TESTS]
    at_once = os.cpu_count() or 1
    seconds = given.minutes * 60
    for_tests = seconds * (_TESTS_SHARE if targets else 1.0) if tests else 0.0
    with ThreadPoolExecutor(at_once) as pool:
        share = (seconds - for_tests) * min(at_once, len(targets) or 1) / (len(targets) or 1)
        running = [pool.submit(atheris, target, share) for target in targets]
        statuses = [each.result() for each in running]
    statuses += [tested(name, for_tests / len(tests)) for name in tests]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
