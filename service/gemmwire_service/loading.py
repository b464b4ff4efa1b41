"""From settings to an engine: its device, its ladder of buckets, and what loads its layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .backends import AUTO, BACKENDS
from .backends.emulation import Emulation
from .buckets import Ladder
from .cores import cores
from .device import Device
from .engine import Engine
from .errors import SettingsError
from .host import Threads
from .loader import Loader
from .settings import Settings

INVARIANT = "flashinfer_batch_invariant"
_FIXED_BUCKET = 128


def make_engine(
    settings: Settings, on_loaded: Callable[[Engine], None] | None
) -> tuple[Engine, Loader, str, Ladder]:
    """-> (engine, what loads its layers, device name, ladder). Errors: SettingsError."""
    device = choose_device(settings.device)
    ladder, choice = _ladder(settings, device)
    threads = _threads(settings.cpu_threads, cores())
    torch.set_num_threads(threads.few)
    loader = Loader(settings, choice)
    engine = Engine(
        lambda report: Device(
            device, ladder, report, graph_budget=settings.graph_budget_bytes, threads=threads
        ),
        loader.load_all,
        max_queue=settings.max_queue,
        max_queue_bytes=settings.max_queue_bytes,
        max_queue_rows=settings.max_queue_rows,
        on_loaded=on_loaded,
    )
    return engine, loader, str(device), ladder


def _ladder(settings: Settings, device: torch.device) -> tuple[Ladder, str]:
    """-> (ladder, choice of backends). Batch invariance is a backend's where one has it, else one fixed M."""
    if not settings.batch_invariant:
        # There every other backend tries each bucket of each layer before it serves, and a GPU keeps a graph.
        costs_nothing = device.type == "cpu" and settings.backend in (AUTO, Emulation.name)
        ladder = Ladder.dense_up_to if costs_nothing else Ladder.up_to
        return ladder(settings.max_bucket), settings.backend
    if settings.backend in (AUTO, INVARIANT) and BACKENDS[INVARIANT]().unavailable(device) is None:
        return Ladder.up_to(settings.max_bucket), INVARIANT
    return Ladder((min(_FIXED_BUCKET, settings.max_bucket),)), settings.backend


def _threads(asked: int, usable: int) -> Threads:
    """One core is left to the event loop, which many short matmuls on all would stall; a long one is done
    sooner on all."""
    return Threads(asked, asked) if asked else Threads(max(1, usable - 1), usable)


def choose_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one. Errors: SettingsError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(
            f"--device is {name}, but torch {torch.__version__} sees no CUDA device here; use --device cpu",
            expected="cpu",
            got=name,
        )
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        known = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        there = "is one CUDA device" if count == 1 else f"are {count} CUDA devices"
        raise SettingsError(
            f"--device is {name}, but there {there} here, {known}; choose from them",
            expected=known,
            got=name,
        )
    return torch.device("cuda", index)  # to make it current takes its number
