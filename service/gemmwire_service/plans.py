"""Plans that were measured once, kept on disk so that the next start need not measure them.

A file holds the plans of one environment and is named for it, so a new GPU or package starts a new file and
leaves the old one for whoever goes back. Writes replace the file whole. Two servers that measure at once each
write what both know; what the second overwrites in the moment between, it measures again another time.
Nothing here stops a server: what cannot be read or written is said once and done without.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .backends.base import Plan
from .backends.cuda_device import capability
from .backends.flashinfer_package import installed

log = logging.getLogger("gemmwire.plans")

FORMAT = 1
_ABSENT = "none"


@dataclass(frozen=True, order=True)
class PlanKey:
    """What a measurement is good for: layers of one padded shape share it."""

    backend: str
    n_pad: int
    k_pad: int
    bucket: int


@dataclass(frozen=True)
class Measured:
    """A plan and the microseconds of one forward with it, quantization included."""

    plan: Plan
    microseconds: float


@dataclass(frozen=True)
class Environment:
    """What a measurement depends on: the GPU, and versions ("none" for a package that is not installed)."""

    gpu: str
    capability: str
    pytorch: str
    cuda: str
    flashinfer: str
    cubins: str
    gemmwire: str

    @classmethod
    def of(cls, device: torch.device) -> Environment:
        on = capability(device)
        return cls(
            gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            capability=".".join(map(str, on)) if on is not None else _ABSENT,
            pytorch=torch.__version__,
            cuda=torch.version.cuda or _ABSENT,
            flashinfer=installed("flashinfer-python") or _ABSENT,
            cubins=installed("flashinfer-cubin") or _ABSENT,
            gemmwire=__version__,
        )

    @property
    def file_name(self) -> str:
        digest = sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        gpu = "".join(letter if letter.isalnum() else "-" for letter in self.gpu)
        return f"plans-{gpu}-{digest[:16]}.json"


class PlanStore:
    """The plans of one environment; in memory alone where `folder` is None or of no use. For one thread."""

    def __init__(self, folder: Path | None, environment: Environment) -> None:
        self.environment = environment
        self.path = folder / environment.file_name if folder is not None else None
        self._measured: dict[PlanKey, Measured] | None = None

    def get(self, key: PlanKey) -> Measured | None:
        return self._known().get(key)

    def put(self, key: PlanKey, measured: Measured) -> None:
        """Keep it, and write it out at once: a start that is interrupted loses nothing."""
        known = self._known()
        known[key] = measured
        if self.path is not None:
            known |= {**self._read(self.path), **known}
            self._write(known)

    def _known(self) -> dict[PlanKey, Measured]:
        if self._measured is None:
            self._measured = self._read(self.path) if self.path is not None else {}
        return self._measured

    def _read(self, path: Path) -> dict[PlanKey, Measured]:
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._go_without(f"cannot be read ({error})")
            return {}
        try:
            return _decode(text, self.environment)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._set_aside(path, error)
            return {}

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Out of the way, yet there for whoever wonders."""
        aside = path.with_name(f"{path.name}.set-aside")
        try:
            os.replace(path, aside)
        except OSError:
            self._go_without(f"cannot be used ({error}), nor moved away")
        else:
            log.warning(
                "%s cannot be used (%s): it is now %s, and its plans are measured anew", path, error, aside
            )

    def _write(self, known: dict[PlanKey, Measured]) -> None:
        if self.path is None:
            return
        # Not a tempfile, which only its owner may read: an image is built by one user and run by another.
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(_encode(known, self.environment))
            os.replace(partial, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            self._go_without(f"cannot be written ({error})")

    def _go_without(self, why: str) -> None:
        log.warning(
            "%s %s: plans are kept for this process only and measured again at the next start; give a folder "
            "that can be written with --cache-dir",
            self.path,
            why,
        )
        self.path = None


def _encode(known: Mapping[PlanKey, Measured], environment: Environment) -> str:
    plans = [
        {**asdict(key), "plan": asdict(known[key].plan), "microseconds": known[key].microseconds}
        for key in sorted(known)
    ]
    return json.dumps({"format": FORMAT, "environment": asdict(environment), "plans": plans}, indent=1) + "\n"


def _decode(text: bytes, environment: Environment) -> dict[PlanKey, Measured]:
    """Raises ValueError, TypeError, KeyError, OverflowError or RecursionError for all but a file of ours."""
    file = json.loads(text)
    if file["format"] != FORMAT:
        raise ValueError(f"its format is {file['format']!r}, this version reads {FORMAT}")
    if file["environment"] != asdict(environment):
        raise ValueError("it was measured on another GPU or with other packages")
    if not isinstance(file["plans"], list):
        raise ValueError("its plans are no list")
    return dict(_entry(entry) for entry in file["plans"])


def _entry(entry: dict[str, Any]) -> tuple[PlanKey, Measured]:
    key = PlanKey(**{field.name: entry[field.name] for field in fields(PlanKey)})
    plan, microseconds = Plan(**entry["plan"]), entry["microseconds"]
    for facts in (key, plan):
        _check_types(facts)
    if not (isinstance(microseconds, (int, float)) and math.isfinite(microseconds)):
        raise ValueError(f"microseconds are {microseconds!r}")
    if plan.bucket != key.bucket:
        raise ValueError(f"a plan of bucket {plan.bucket} is kept for bucket {key.bucket}")
    return key, Measured(plan, float(microseconds))


def _check_types(facts: PlanKey | Plan) -> None:
    """By name, because `from __future__ import annotations` leaves the fields' types as texts."""
    for field in fields(facts):
        value = getattr(facts, field.name)
        if type(value).__name__ != field.type:
            raise ValueError(f"{field.name} is {value!r}, not of type {field.type}")
