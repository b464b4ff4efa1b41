"""What the service kept for its next start, and something else has written to since."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from fuzz.checkpoints import folder
from fuzz.target import Target, quoted
from gemmwire_service.backends.base import Plan
from gemmwire_service.plans import Environment, Measured, PlanKey, PlanStore

ENVIRONMENT = Environment("gpu", "10.0", "2", "13", "0", "0", "0")
KEY = PlanKey("scripted", 256, 512, 8)


def plans(data: bytes) -> None:
    (folder() / ENVIRONMENT.file_name).write_bytes(data)
    with _quiet():
        found = PlanStore(folder(), ENVIRONMENT).get(KEY)
    assert found is None or found.plan.bucket == KEY.bucket


@contextmanager
def _quiet() -> Iterator[None]:
    """Each refusal is said, thousands of times a second."""
    log = logging.getLogger("gemmwire")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _plans() -> bytes:
    store = PlanStore(folder(), ENVIRONMENT)
    store.put(KEY, Measured(Plan(8, "8x4", "cuda"), 12.5))
    path = folder() / ENVIRONMENT.file_name
    text = path.read_bytes()
    path.unlink()
    return text


WORDS = quoted(*asdict(ENVIRONMENT), *asdict(KEY), "plan", "layout", "quantizer", "microseconds", "format")
CACHES = (Target("plans", plans, {"one": _plans()}, words=(*WORDS, b"1e400", b"NaN", b"9" * 400)),)
