"""The ladder of row counts that forwards run at.

A forward runs at a bucket, never at the caller's own m: the rows m..bucket are zero and their answers
dropped. Plans, tuning and captured graphs are kept for this small fixed set of sizes. This module is the only
place that rounds M, so that what was planned for one size can never meet a forward of another.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from gemmwire_service.errors import SettingsError

DEFAULT_LARGEST = 4096


def _powers_up_to(largest: int) -> tuple[int, ...]:
    below = tuple(2**power for power in range(largest.bit_length()) if 2**power < largest)
    return (*below, largest)


def _halfway(powers: tuple[int, ...]) -> tuple[int, ...]:
    """With the middle between each and the next that is one: 1, 2, 3, 4, 6, 8, 12 ..."""
    between = [(low + high) // 2 for low, high in pairwise(powers)]
    return tuple(sorted({*powers, *between}))


@dataclass(frozen=True)
class Ladder:
    """Bucket sizes, smallest first; by default the powers of two from 1 to 4096.

    Raises SettingsError unless there is at least one and all are positive and strictly increasing.
    """

    buckets: tuple[int, ...] = _powers_up_to(DEFAULT_LARGEST)

    def __post_init__(self) -> None:
        rising = all(smaller < larger for smaller, larger in pairwise(self.buckets))
        if not self.buckets or self.buckets[0] < 1 or not rising:
            raise SettingsError(
                f"buckets {list(self.buckets)} are no ladder: give one or more positive row counts, each "
                "larger than the one before it, such as 1, 8, 64, 512",
                expected="positive, strictly increasing row counts",
                got=list(self.buckets),
            )

    @classmethod
    def up_to(cls, largest: int) -> Ladder:
        """The powers of two below `largest`, then `largest` itself. Raises SettingsError below 1."""
        return cls(_powers_up_to(largest))

    @classmethod
    def dense_up_to(cls, largest: int) -> Ladder:
        """With twice the steps, for a device on which a bucket costs nothing and each of its rows time."""
        return cls(_halfway(_powers_up_to(largest)))

    @property
    def largest(self) -> int:
        return self.buckets[-1]

    def bucket_for(self, m: int) -> int:
        """The smallest bucket that holds m rows. Raises ValueError unless 1 <= m <= largest."""
        if not 1 <= m <= self.largest:
            raise ValueError(
                f"no bucket holds {m} rows: they hold 1 to {self.largest}; answer 0 rows without a forward "
                "and split more with chunks()"
            )
        return self.buckets[bisect_left(self.buckets, m)]

    def chunks(self, m: int) -> tuple[int, ...]:
        """Row counts that add up to m and each fit a bucket: full largest buckets, then what is left.

        chunks(0) is empty: no rows, no forward. Raises ValueError for a negative m.
        """
        if m < 0:
            raise ValueError(f"{m} rows: a row count is 0 or more")
        full, rest = divmod(m, self.largest)
        return (self.largest,) * full + ((rest,) if rest else ())
