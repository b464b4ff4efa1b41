"""How the threads of a matmul on a CPU wait for each other."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_SPINS = "1000"  # what libgomp takes itself where it knows that there are more threads than cores


def wait_shortly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have a thread that waits for another soon give its core away; to be called before torch is imported.

    libgomp lets it spin for some ms, which is for a process that has the machine for itself. Here the event
    loop and the clients need cores too: where the scheduler puts both threads of a matmul on one, a forward
    of 1.6 ms took 8, and with eight clients who send 16 MiB each a third of the answers were lost to it.
    What the user says of it in the environment holds.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environ.keys():
        environ["GOMP_SPINCOUNT"] = _SPINS
