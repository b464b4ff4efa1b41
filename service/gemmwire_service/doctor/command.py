"""The sub-command: its arguments, its order of work, its exit status."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence

import torch

from gemmwire_service.backends import AUTO, BACKENDS, PRIORITY, select
from gemmwire_service.errors import BackendError
from gemmwire_service.tuning import reason

from .host import facts
from .report import Report
from .trial import FAILS, PASSED_OVER, SPEC, Trial, try_backend, try_isolated

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Exit status: 0 if the backend that would serve works, 1 if none does; argparse exits with 2."""
    options = parser(environ).parse_args(list(arguments))
    # What the backends log is in the report, as the reason of the one it is about.
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    try:
        report = examine(options.backend, _device(options.device))
    except Exception as error:  # of a report on what is broken, one line is worth more than a traceback
        print(f"gemmwire-serve check: {reason(error)}", file=sys.stderr)
        return 1
    print(report.json() if options.json else report.text(_in_colour(environ)), flush=True)
    return 0 if report.ok else 1


def examine(choice: str, device: torch.device) -> Report:
    """Look at the host, then try every backend of PRIORITY and those that `choice` names beside them."""
    found = tuple(facts())
    missing = _missing(device)
    if missing is not None:
        trials = tuple(Trial(name, PASSED_OVER, missing) for name in _names(choice))
        return Report(str(device), choice, found, trials, None, missing)
    trials = tuple(_try(name, device) for name in _names(choice))
    try:
        chosen, problem = select(SPEC, device, choice).backend.name, None
    except BackendError as error:
        chosen, problem = None, str(error)
    return Report(str(device), choice, found, trials, chosen, problem)


def _names(choice: str) -> list[str]:
    asked = [name.strip() for name in choice.split(",")]
    return list(dict.fromkeys([*PRIORITY, *(name for name in asked if name != AUTO)]))


def _try(name: str, device: torch.device) -> Trial:
    """A GPU is tried from a process of its own, unless there is nothing to try."""
    if device.type != "cuda":
        return try_backend(name, device)
    try:
        backend = BACKENDS[name]()
        against = backend.unavailable(device) or backend.rejects(SPEC)
    except Exception as error:
        return Trial(name, FAILS, reason(error))
    if against is not None:
        return Trial(name, PASSED_OVER, against)
    print(f"trying {name}, whose kernels may be compiled first, for minutes ...", file=sys.stderr, flush=True)
    return try_isolated(name, device)


def _missing(device: torch.device) -> str | None:
    """Why there is no such device, or None."""
    if device.type != "cuda":
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) < count:
        return None
    return f"there is no {device}: torch {torch.__version__} sees {count} CUDA devices here"


def _device(name: str) -> torch.device:
    if name == AUTO:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _in_colour(environ: Mapping[str, str]) -> bool:
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="gemmwire-serve check",
        description="Say what this host has and lacks, run one small layer through every backend that can, "
        "and say which of them a server would use. Exit status 0 only if that one works.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--backend",
        type=_backends,
        default=environ.get("GEMMWIRE_BACKEND", AUTO),
        metavar="NAME",
        help="as for serving: auto, a name, or a comma list",
    )
    result.add_argument(
        "--device",
        type=_device_name,
        default=environ.get("GEMMWIRE_DEVICE", AUTO),
        metavar="DEVICE",
        help="auto, cpu, cuda or cuda:INDEX",
    )
    result.add_argument("--json", action="store_true", help="print JSON, whose keys stay as they are")
    return result


def _backends(text: str) -> str:
    known = (AUTO, *BACKENDS)
    unknown = [name.strip() for name in text.split(",") if name.strip() not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return text


def _device_name(text: str) -> str:
    if not _DEVICE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, cpu, cuda and cuda:INDEX")
    return text
