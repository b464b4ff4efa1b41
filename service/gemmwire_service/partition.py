"""Which layers each of several servers has, where one device does not hold them all.

Every server finds the same answer by itself, from the names and shapes of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .checkpoint import Checkpoint
from .checkpoint.wrapped import WrappedCheckpoint
from .errors import SettingsError


@dataclass(frozen=True)
class Share:
    """`--part INDEX/COUNT`: one part of COUNT, the first is 1."""

    index: int
    count: int

    @classmethod
    def of(cls, text: str) -> Share:
        """Of a text that the settings have checked."""
        index, _, count = text.partition("/")
        return cls(int(index), int(count))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of_all(self, sizes: Mapping[str, int]) -> frozenset[str]:
        """The names of this part. Errors: SettingsError where there are more parts than layers."""
        if len(sizes) < self.count:
            raise SettingsError(
                f"There are {len(sizes)} layers, fewer than {self.count} parts; make no more parts than "
                "there are layers",
                expected=f"<= {len(sizes)}",
                got=self.count,
            )
        return frozenset(partition(sizes, self.count)[self.index - 1])


def partition(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """`count` parts of about the same sum, none of them empty where there are as many names.

    The largest first, each to the part that has least (Graham 1969: no part exceeds 4/3 of the best split's
    largest); of equals the first by name, to the first. So the same names and sizes give the same parts.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    sums = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        lightest = min(range(count), key=lambda index: (sums[index], len(parts[index]), index))
        parts[lightest].append(name)
        sums[lightest] += sizes[name]
    return parts


class PartOfCheckpoint(WrappedCheckpoint):
    """A `Checkpoint` of which some layers are served here; there may be none."""

    def __init__(self, checkpoint: Checkpoint, chosen: Collection[str], share: Share) -> None:
        super().__init__(checkpoint)
        self._chosen = tuple(name for name in checkpoint.names() if name in chosen)
        self._share = share

    @property
    def notes(self) -> tuple[str, ...]:
        here = f"{len(self._chosen)} of {len(self._within.names())} layers are of part {self._share}"
        return (*super().notes, here)

    def names(self) -> tuple[str, ...]:
        return self._chosen
