"""The figures of docs/scaling.md, computed from what was measured.

    ./dev python tests/scaling_table.py

writes them anew; a test holds the page to them. The measurements that README.md states are read from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from source_tree import ROOT, written

PAGE = ROOT / "docs" / "scaling.md"
README = ROOT / "README.md"

LINK = 100e9 / 8 * 1448 / 1538  # bytes a second, each way, of TCP in frames of 1538 bytes on the wire
HEAD = 512  # bytes of a request or an answer beside its tensors
BF16, MXFP8 = 2.0, 33 / 32  # bytes an element; one scale for 32 elements
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K
# Requests a second from 8 clients on the host of an H200 (16 cores, loopback), x [M, 4096], W [4096, 4096],
# in BF16, as bench/gpu_http.py measures them: means of 2 rounds of 2 s.
SERVED_BY_GPU = {1: 16760, 16: 9227, 64: 4131, 256: 666, 1024: 192, 4096: 75}


@dataclass(frozen=True)
class Traffic:
    """One request: x [m, k] goes, y [m, n] in BF16 comes."""

    m: int
    n: int
    k: int
    element: float = BF16

    @property
    def there(self) -> float:
        return HEAD + self.m * self.k * self.element

    @property
    def back(self) -> float:
        return HEAD + self.m * self.n * BF16

    @property
    def per_link(self) -> float:
        """Requests a second that fill the link, whose two directions are independent."""
        return LINK / max(self.there, self.back)


def forwards() -> dict[int, list[float]]:
    """Microseconds of a forward on the GPU by M, for each of SHAPES."""
    rows = re.findall(r"^\| (\d+) \|((?: [\d.]+ / [\d.]+ us = [\d.]+ \|){3})", README.read_text(), re.M)
    return {int(m): [float(us) for us in re.findall(r"([\d.]+) /", cells)] for m, cells in rows}


def served_by_cpu() -> dict[int, int]:
    """Requests a second from 8 clients by M, x [M, 1024], W [1024, 1024], on two cores."""
    row = re.search(r"^\| gemmwire, binary OIP, one thread \|.*$", README.read_text(), re.M)
    assert row is not None
    rates = [int(rate) for rate in re.findall(r"\| (\d+)/s", row[0])]
    return dict(zip((1, 16, 256), rates, strict=False))  # the last is of another W


def of_a_replica() -> list[str]:
    lines = ["| replica | M | requests/s | rows/s | GB/s each way | of the device's time, at most |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for m, rate in served_by_cpu().items():
        lines.append(f"| two CPU cores, 1024x1024 | {m} | {rate} | {rate * m} | {_gb(rate * m * 2048)} | |")
    for m, rate in SERVED_BY_GPU.items():
        busy = rate * forwards()[m][0] / 1e6
        lines.append(
            f"| H200, 4096x4096 | {m} | {rate} | {rate * m} | {_gb(rate * m * 8192)} | {min(1.0, busy):.0%} |"
        )
    return lines


def of_a_link() -> list[str]:
    lines = [
        '| layer N x K | M | a link takes | replicas that fill it | with `quantize="client"` | replicas |'
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for n, k in SHAPES:
        for m in (1, 16, 256, 4096):
            plain, small = Traffic(m, n, k), Traffic(m, n, k, MXFP8)
            cells = [f"{n} x {k}", str(m)]
            for traffic in (plain, small):
                cells += [f"{traffic.per_link:.0f}/s", str(replicas(traffic))]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def replicas(traffic: Traffic) -> int:
    """That fill the link, where one moves as many bytes a second, both ways together, as it was measured to
    with this M, and no more requests than that."""
    measured, (n, k) = SERVED_BY_GPU[traffic.m], SHAPES[0]
    same = Traffic(traffic.m, n, k)
    by_bytes = measured * (same.there + same.back) / (traffic.there + traffic.back)
    return ceil(traffic.per_link / min(measured, by_bytes))


def _gb(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f}"


TABLES = {"replica": of_a_replica, "link": of_a_link}


def renewed(page: str) -> str:
    """The page with the tables as they ought to be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name}: written by tests/scaling_table.py -->", f"<!-- end of {name} -->"
        page = written(page, begin, end, "\n".join(table()))
    return page


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
