"""The backends, in order of preference, and the choice among them.

The order is the policy: nothing below knows any backend by name. A backend of BACKENDS that PRIORITY lacks is
never chosen by itself, only by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType

import torch

from gemmwire_service.backends.base import Backend, LayerSpec
from gemmwire_service.errors import BackendError

__all__ = ["AUTO", "BACKENDS", "PRIORITY", "Selection", "select"]

PRIORITY = ("flashinfer_trtllm", "flashinfer_cutedsl", "flashinfer_cutlass", "cublas", "emulation")
AUTO = "auto"


_CLASSES = {
    "flashinfer_trtllm": "FlashinferTrtllm",
    "flashinfer_cutedsl": "FlashinferCutedsl",
    "flashinfer_cutlass": "FlashinferCutlass",
    "flashinfer_batch_invariant": "FlashinferBatchInvariant",
    "cublas": "Cublas",
    "emulation": "Emulation",
    "emulation_e4m3": "EmulationE4m3",
}


@cache
def _made(name: str) -> Backend:
    backend: Backend = getattr(import_module(f"{__name__}.{name}"), _CLASSES[name])()
    return backend


# Each is imported, and its one instance made, when it is first asked for.
BACKENDS: dict[str, Callable[[], Backend]] = {name: partial(_made, name) for name in _CLASSES}


@dataclass(frozen=True)
class Selection:
    """The backend of a layer, and each one preferred to it with the reason it does not run the layer here."""

    backend: Backend
    passed_over: tuple[tuple[str, str], ...]


def select(
    spec: LayerSpec,
    device: torch.device,
    choice: str = AUTO,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Selection:
    """The first backend of `choice` that can run the layer on `device`.

    choice: "auto", which is PRIORITY; one name, which is binding; or a comma list, which is a preference and
    may end in auto. `failed` names those that were tried and failed, with the reason. Raises BackendError for
    an unknown name, and, with the reason of each, when none can.
    """
    passed_over: list[tuple[str, str]] = []
    for name in _candidates(choice):
        reason = failed.get(name) or _reason_against(name, spec, device)
        if reason is None:
            return Selection(BACKENDS[name](), tuple(passed_over))
        passed_over.append((name, reason))
    raise _none_fits(spec, device, choice, passed_over)


def _candidates(choice: str) -> tuple[str, ...]:
    """The names of a choice in order, each once."""
    names = [name.strip() for name in choice.split(",")]
    unknown = [name for name in names if name not in (AUTO, *BACKENDS)]
    if unknown:
        raise BackendError(
            f"no backend is named {unknown[0]!r}: choose auto, one of {', '.join(BACKENDS)}, or a comma list "
            "of them",
            expected=[AUTO, *BACKENDS],
            got=choice,
        )
    spelled = (PRIORITY if name == AUTO else (name,) for name in names)
    return tuple(dict.fromkeys(name for part in spelled for name in part))


def _reason_against(name: str, spec: LayerSpec, device: torch.device) -> str | None:
    backend = BACKENDS[name]()
    return backend.unavailable(device) or backend.rejects(spec)


def _none_fits(
    spec: LayerSpec, device: torch.device, choice: str, passed_over: list[tuple[str, str]]
) -> BackendError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    asked = {name for name, _ in passed_over}
    others = [name for name in PRIORITY if name not in asked and _reason_against(name, spec, device) is None]
    way_out = f"{', '.join(others)} can: name it, or choose auto" if others else "no other backend can either"
    return BackendError(
        f"layer {spec.name!r} (N={spec.n}, K={spec.k}) on {device} with backend {choice!r}: {reasons}. "
        f"{way_out}",
        expected=others,
        got=choice,
    )
