"""What a child process begins anew after a fork."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def reset_after_fork(self) -> None:
        """Called in the child, before anything of it is used there."""
        ...


_KEPT: weakref.WeakSet[Forked] = weakref.WeakSet()


def reset_after_fork(owner: Forked) -> None:
    """Have it told of forks for as long as it lives."""
    _KEPT.add(owner)


def _reset_all() -> None:
    for owner in list(_KEPT):
        owner.reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
