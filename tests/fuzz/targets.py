"""Every target, by name."""

from __future__ import annotations

from fuzz.answers import ANSWERS
from fuzz.caches import CACHES
from fuzz.checkpoints import CHECKPOINTS
from fuzz.requests import REQUESTS

TARGETS = {target.name: target for target in (*REQUESTS, *CHECKPOINTS, *CACHES, *ANSWERS)}
