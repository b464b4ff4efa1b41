"""The two kernels at the ends of a graph that takes x from host memory itself, and puts y there.

Which memory that is, an entry of the mailbox says: of four integers, the addresses of x and y and how many
elements of each there are. A counter in device memory says whose turn it is, so that a graph that is captured
once reads another entry at each replay. Pinned memory has one address for host and device.

Triton is imported with this module; mail.py imports it where there is a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of one program


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def bring_kernel(entries, turn, x, total, slots: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
    """x, BF16 flat: the entry's elements, whole blocks of 32, then zeros up to `total`."""
    entry = entries + (tl.load(turn) % slots) * 4
    source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.bfloat16)), 16)
    count = tl.multiple_of(tl.load(entry + 2), 32)
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(source + at, mask=at < count, other=0.0)
    tl.store(x + at, values, mask=at < total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def send_kernel(  # type: ignore[no-untyped-def,unused-ignore]
    entries, turn, done, y, slots: tl.constexpr, block: tl.constexpr, unit: tl.constexpr
):
    """The entry's elements of y, BF16 flat, a multiple of `unit`; the last program to come ends the turn."""
    now = tl.load(turn)
    entry = entries + (now % slots) * 4
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.bfloat16)), 16)
    count = tl.multiple_of(tl.load(entry + 3), unit)
    at = tl.program_id(0) * block + tl.arange(0, block)
    values = tl.load(y + at, mask=at < count, other=0.0)
    tl.store(target + at, values, mask=at < count)
    if tl.atomic_add(done, 1) == tl.num_programs(0) - 1:
        tl.store(done, 0)
        tl.store(turn, now + 1)


def bring(entries: Tensor, turn: Tensor, x: Tensor, slots: int) -> None:
    """Queue the first of the two. entries: int64 [4 * slots] in pinned memory; on the device turn, int64 [1],
    and x, BF16."""
    total = x.numel()
    bring_kernel[(triton.cdiv(total, BLOCK),)](entries, turn, x, total, slots, BLOCK)


def send(entries: Tensor, turn: Tensor, done: Tensor, y: Tensor, slots: int) -> None:
    """Queue the second. y: BF16 [m, n] on the device; done: int32 [1], zero."""
    unit = 8 if y.shape[1] % 8 == 0 else 1
    send_kernel[(triton.cdiv(y.numel(), BLOCK),)](entries, turn, done, y, slots, BLOCK, unit)
