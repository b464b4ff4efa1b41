"""The functions in C, each compiled at its first use on a machine.

    python -m gemmwire_service.compiled      # compile them for other machines, beside their sources

A library is kept in a folder of the user's own, under a name that stands for its source, the compiler's
options and the processor. An image without a compiler has it compiled beside the source, as the command does,
for each level of x86-64 that helps.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("gemmwire.compiled")

FOLDER = Path(__file__).parent
FAKE_CPU, FEW_ROWS = FOLDER / "mxfp8/fake_cpu.c", FOLDER / "mxfp8/few_rows.c"
SHM_MAPPING = FOLDER / "shm_mapping.c"
SOURCES = (FAKE_CPU, FEW_ROWS, SHM_MAPPING)
# They come after those of CC, and undo some: a library that is linked for fast math has the thread that loads
# it flush what is below 2^-126, also in what torch computes.
OPTIONS = (
    "-O3",
    "-fno-fast-math",
    "-fno-unsafe-math-optimizations",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-std=c11",
)
# What a level needs of /proc/cpuinfo, and how gcc and clang are told of it; the better one first.
_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = {
    "x86-64-v4-bf16": (_V4 | {"avx512_bf16"}, ("-march=x86-64-v4", "-mavx512bf16")),
    "x86-64-v4": (_V4, ("-march=x86-64-v4",)),
    "x86-64-v3": (_V3, ("-march=x86-64-v3",)),
}
COMPILERS = ("cc", "gcc", "clang")
# For this very processor, as compilers of different architectures spell it.
FOR_HERE = (("-march=native",), ("-mcpu=native",), ())
TIMEOUT_S = 60.0


class NotCompiled(Exception):
    """There is no library for this processor, and none can be made; the text says why."""


class Library(NamedTuple):
    """Its functions keep Python's lock while they run, or give it away."""

    holding: ctypes.PyDLL
    freeing: ctypes.CDLL


def load(source: Path, folder: Path | None) -> Library:
    """The library of a source, kept in `folder` from its first use on.

    Where there is none that it can be kept in, it is compiled anew. Errors: NotCompiled.
    """
    for find in (_baked, partial(_cached, folder=folder)):
        path = find(source)
        try:
            if path is not None:
                return _opened(path)
        except NotCompiled as error:  # it is damaged, or its file system runs nothing
            log.warning("%s is compiled anew at each start: %s", source.name, error)
    with tempfile.TemporaryDirectory(prefix="gemmwire-") as name:  # once loaded, it needs its file no more
        path = Path(name) / f"{source.stem}.so"
        _compile(source, path, FOR_HERE)
        return _opened(path)


def _opened(path: Path) -> Library:
    try:
        return Library(ctypes.PyDLL(str(path)), ctypes.CDLL(str(path)))
    except OSError as error:
        raise NotCompiled(f"{path} cannot be loaded ({error})") from error


# Where the library is.


def _baked(source: Path) -> Path | None:
    """One that was compiled beside the source for a level that this processor has."""
    flags = set(_flags().split())
    for level, (needed, _) in LEVELS.items():
        path = _beside(source, level)
        if needed <= flags and path.is_file():
            return path
    return None


def _beside(source: Path, level: str) -> Path:
    return source.with_name(f"{source.stem}-{level}-{_digest(source)}.so")


def _digest(source: Path, *others: str) -> str:
    """Stands for a library's source, its options and `others`: one of an earlier version is never loaded."""
    text = "\n".join((source.read_text(), *OPTIONS, *others))
    return sha256(text.encode()).hexdigest()[:16]


def _cached(source: Path, folder: Path | None) -> Path | None:
    """The library in `folder`, made there if need be; None where it cannot be, or others could change it."""
    if folder is None:
        return None
    flags = _flags()
    name = f"{source.stem}-{_digest(source, platform.machine(), flags)}.so"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask lets a group do
        path = folder.resolve() / name
        if not _is_private(path.parent):
            log.warning(
                "%s is compiled anew at each start: others than its owner can change what is in %s; "
                "take that right from them, or set --cache-dir to another folder",
                source.name,
                path.parent,
            )
            return None
        if not _is_ours(path):
            # Where nothing tells this processor from others with the same home, for any of its architecture.
            _compile(source, path, FOR_HERE if flags else ((),))
        return path if _is_ours(path) else None
    except OSError as error:
        log.warning(
            "%s is compiled anew at each start: it cannot be kept in %s (%s); set --cache-dir to a folder "
            "that can be written to",
            source.name,
            folder,
            error.strerror,
        )
        return None


def _is_private(folder: Path) -> bool:
    """Whether nobody but this user (and root) can put a file into it, or another folder in its place."""
    replaceable = [
        each for each in folder.parents if each.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    ]
    return _is_ours(folder) and not replaceable


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user (and root) can have made it: what it holds is run."""
    try:
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid in {0, os.getuid()} and not found.st_mode & others and not stat.S_ISLNK(found.st_mode)


def _flags() -> str:
    """What the processor can do, as Linux lists it; "" where it does not."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


# Compiling.


def _compile(source: Path, path: Path, processors: Sequence[Sequence[str]]) -> None:
    """By the first of these options that the compiler takes. Errors: NotCompiled, OSError."""
    compiler = _compiler()
    said = ""
    with tempfile.TemporaryDirectory(prefix=f".{source.stem}-", dir=path.parent) as name:
        made = Path(name) / path.name
        for processor in processors:
            command = [*compiler, *OPTIONS, *processor, "-o", str(made), str(source)]
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                raise NotCompiled(f"{compiler[0]} did not end within {TIMEOUT_S:g} seconds") from None
            if done.returncode == 0 and made.is_file():
                made.chmod(0o755)
                os.replace(made, path)
                return
            said = said or done.stderr.decode(errors="replace").strip()[-300:] or "it made no library"
    raise NotCompiled(f"{compiler[0]} fails on {source.name}: {said}")


def _compiler() -> list[str]:
    named = os.environ.get("CC", "").split()
    found = shutil.which(named[0]) if named else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        wanted = f"CC names {named[0]!r}, which is not there" if named else "there is no C compiler"
        raise NotCompiled(f"{wanted}; install one ({', '.join(COMPILERS)})")
    return [found, *named[1:]]


def bake() -> None:
    """Compile all for every level of this architecture, beside the sources. Errors: NotCompiled, OSError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotCompiled(f"there are no levels of {platform.machine()}; it is compiled at its first use")
    for source in SOURCES:
        for level, (_, options) in LEVELS.items():
            _compile(source, _beside(source, level), (options,))
            print(_beside(source, level))


if __name__ == "__main__":
    try:
        bake()
    except NotCompiled as error:
        sys.exit(f"compiled: {error}")
