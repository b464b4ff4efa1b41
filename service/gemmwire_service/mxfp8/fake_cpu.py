"""Fake quantization on a CPU in one pass: fake_cpu.c, compiled at its first use on a machine.

    python -m gemmwire_service.mxfp8.fake_cpu      # compile it for other machines, beside its source

The library is kept in a folder of the user's own, under a name that stands for its source, the compiler's
options and the processor. An image without a compiler has it compiled beside the source, as the second form
does, for each level of x86-64 that helps.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from .format import BLOCK

SOURCE = Path(__file__).with_name("fake_cpu.c")
OPTIONS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC", "-std=c11")
# What gcc's and clang's x86-64 levels need of /proc/cpuinfo, the better one first.
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
}
COMPILERS = ("cc", "gcc", "clang")
FOR_HERE = ("-march=native", "-mcpu=native", "")  # as compilers of different architectures spell it
TIMEOUT_S = 60.0
_HOLDING_UP_TO = 1 << 18  # elements: giving Python's lock away meanwhile would take longer than the work

_SHARED_FROM = 1 << 20  # elements: a third of a millisecond, of which waking a thread takes a tenth

Quantize = Callable[[Tensor, Tensor], None]


class NotCompiled(Exception):
    """There is no library for this processor, and none can be made; the text says why."""


def load(folder: Path | None) -> Quantize:
    """fake_quantize(x, out) of fake.py for tensors on a CPU, kept in `folder` from its first use on.

    Where there is none that it can be kept in, it is compiled anew. Errors: NotCompiled.
    """
    path = _baked() or _cached(folder)
    if path is not None:
        return _bound(path)
    with tempfile.TemporaryDirectory(prefix="gemmwire-") as name:  # once loaded, it needs its file no more
        path = Path(name) / "fake_cpu.so"
        _compile(path, FOR_HERE)
        return _bound(path)


def _bound(path: Path) -> Quantize:
    try:
        freeing = ctypes.CDLL(str(path)).gemmwire_fake_quantize
        holding = ctypes.PyDLL(str(path)).gemmwire_fake_quantize
    except (OSError, AttributeError) as error:
        raise NotCompiled(f"{path} cannot be loaded ({error})") from error
    for function in (freeing, holding):
        function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 4
        function.restype = None

    pool = _Pool()

    def quantize(x: Tensor, out: Tensor) -> None:
        m, k = x.shape
        if k % BLOCK or out.shape != x.shape:  # it would read, or write, beyond their ends
            raise ValueError(
                f"x is {[m, k]} and out {list(out.shape)}: K has to be a multiple of {BLOCK} in both"
            )
        if m * k < _SHARED_FROM:
            function = holding if m * k <= _HOLDING_UP_TO else freeing
            function(x.data_ptr(), out.data_ptr(), m, k, x.stride(0), out.stride(0))
        else:
            pool.run(freeing, x, out)

    return quantize


class _Pool:
    """Rows shared among as many threads as torch has for a matmul, the calling one among them."""

    def __init__(self) -> None:
        self._others: ThreadPoolExecutor | None = None

    def run(self, function: Callable[..., None], x: Tensor, out: Tensor) -> None:
        parts = list(zip(*(each.chunk(torch.get_num_threads()) for each in (x, out)), strict=True))
        if self._others is None and len(parts) > 1:
            self._others = ThreadPoolExecutor(thread_name_prefix="gemmwire-quantize")
        first, *others = [
            (a.data_ptr(), b.data_ptr(), len(a), x.shape[1], x.stride(0), out.stride(0)) for a, b in parts
        ]
        under_way = [self._others.submit(function, *part) for part in others] if self._others else []
        function(*first)
        for each in under_way:
            each.result()


# Where the library is.


def _baked() -> Path | None:
    """One that was compiled beside the source for a level that this processor has."""
    flags = set(_processor().split())
    for level, needed in LEVELS.items():
        path = _beside(level)
        if needed <= flags and path.is_file():
            return path
    return None


def _beside(level: str) -> Path:
    return SOURCE.with_name(f"fake_cpu-{level}.so")


def _cached(folder: Path | None) -> Path | None:
    """The library in `folder`, made there if need be; None where it cannot be, or others could change it."""
    if folder is None:
        return None
    text = "\n".join((SOURCE.read_text(), *OPTIONS, platform.machine(), _processor()))
    path = folder / f"fake_cpu-{sha256(text.encode()).hexdigest()[:16]}.so"
    try:
        if not _is_ours(path):
            folder.mkdir(parents=True, exist_ok=True)
            _compile(path, FOR_HERE)
        return path if _is_ours(path) else None
    except OSError:
        return None


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user (and root) can have put it there: what it holds is run."""
    try:
        found, folder = path.stat(), path.parent.stat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    owners = {0, os.getuid()}
    return all(each.st_uid in owners and not each.st_mode & others for each in (found, folder))


def _processor() -> str:
    """What tells processors apart: the flags that Linux lists, elsewhere its name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


# Compiling.


def _compile(path: Path, processors: Sequence[str]) -> None:
    """By the first of these options that the compiler takes. Errors: NotCompiled, OSError."""
    compiler = _compiler()
    said = ""
    with tempfile.TemporaryDirectory(prefix=".fake_cpu-", dir=path.parent) as name:
        made = Path(name) / path.name
        for processor in processors:
            options = [*OPTIONS, *filter(None, [processor]), "-o", str(made), str(SOURCE)]
            try:
                done = subprocess.run(
                    [*compiler, *options], capture_output=True, text=True, timeout=TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                raise NotCompiled(f"{compiler[0]} did not end within {TIMEOUT_S:g} seconds") from None
            if done.returncode == 0:
                os.replace(made, path)
                return
            said = said or done.stderr.strip()[-300:]
    raise NotCompiled(f"{compiler[0]} fails on {SOURCE.name}: {said}")


def _compiler() -> list[str]:
    named = os.environ.get("CC", "").split()
    found = shutil.which(named[0]) if named else next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None:
        wanted = f"CC names {named[0]!r}, which is not there" if named else "there is no C compiler"
        raise NotCompiled(f"{wanted}; install one ({', '.join(COMPILERS)})")
    return [found, *named[1:]]


def bake() -> None:
    """Compile it for every level of this architecture, beside the source. Errors: NotCompiled, OSError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise NotCompiled(f"there are no levels of {platform.machine()}; it is compiled at its first use")
    for level in LEVELS:
        _compile(_beside(level), (f"-march={level}",))
        print(_beside(level))


if __name__ == "__main__":
    try:
        bake()
    except NotCompiled as error:
        sys.exit(f"fake_cpu: {error}")
