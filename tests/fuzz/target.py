"""What is fuzzed: a stranger's bytes go in, and an answer or the project's own refusal comes out."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
_BASE = 2 << 20  # bytes that any run may take, for caches and buffers of a fixed size


@dataclass(frozen=True)
class Target:
    """`run` takes bytes and returns; whatever it raises is a finding.

    memory: bytes that Python and NumPy may take at one time for each byte of the input; the most that a JSON
    array of empty arrays or objects needs, where JSON is read. words: what a mutation may put together.
    seeds: inputs that are right, by name, for a mutation to begin with.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Mapping[str, bytes]
    memory: int = 100
    words: tuple[bytes, ...] = ()

    def corpus(self) -> dict[str, bytes]:
        """Inputs that once were findings, by name."""
        folder = CORPUS / self.name
        return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.bin"))}

    def bounded(self, data: bytes) -> None:
        """`run`, and an AssertionError where it took more memory than is stated, each time of three.

        Once is not enough: a table of the interpreter's own, that of interned strings for one, doubles on
        whatever input fills it, and a first use imports. What an input costs, it costs again.
        """
        most = _BASE + self.memory * len(data)
        peak = self._peak(data)
        for _ in range(2):
            if peak > most:
                peak = min(peak, self._peak(data))
        assert peak <= most, (
            f"{self.name}: {len(data)} bytes took {peak} bytes of memory, {most} is the bound"
        )

    def _peak(self, data: bytes) -> int:
        """Bytes that Python and NumPy took at one time while `run` had this input."""
        tracemalloc.start()
        try:
            self.run(data)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def quoted(*names: str) -> tuple[bytes, ...]:
    """Words as JSON has them."""
    return tuple(f'"{name}"'.encode() for name in names)
