"""One target under atheris: python -m fuzz.instrumented TARGET [libFuzzer's flags and folders].

A process of its own, for libFuzzer ends the one it runs in. Its exit status is 0 where nothing was found.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from zlib import crc32

import atheris

# What reads a stranger's bytes in Python; torch and NumPy's arrays only carry them.
INSTRUMENTED = ["gemmwire", "gemmwire_service", "json", "zipfile", "tokenize", "ast", "numpy.lib"]
_MEASURED = 16  # one input of so many has its memory measured, which takes several times as long


def main(arguments: list[str]) -> None:
    atheris.enabled_hooks.add("str")
    with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
        from fuzz.mutation import mutated
        from fuzz.targets import TARGETS
    target = TARGETS[arguments[1]]
    warnings.simplefilter("ignore")
    for seed in target.seeds.values():  # what is imported and remembered is of no input
        target.run(seed)

    def one(data: bytes) -> None:
        (target.run if crc32(data) % _MEASURED else target.bounded)(data)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        changed = mutated(data, chance, target.words) if chance.random() < 0.5 else None
        if changed is None or len(changed) > most:
            changed = atheris.Mutate(data, most)
        return bytes(changed)

    atheris.Setup([arguments[0], *arguments[2:]], one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    # libFuzzer leaves by _exit, which would drop what is still in the buffers.
    sys.stdout = os.fdopen(1, "w", buffering=1)
    main(sys.argv)
