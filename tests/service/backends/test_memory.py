"""How much memory preparing a weight takes, measured on a process of its own."""

from __future__ import annotations

import pytest

from gemmwire_service.backends import BACKENDS
from peak import MIB, STATUS, measurable, measured

N, K = 8192, 8192
KERNELS = tuple(
    name for name in BACKENDS if not name.startswith("emulation")
)  # those whose form is of a byte
SLACK = 2 * MIB  # what a process does beside it; a second copy of the scales takes as much

# The weight itself is there before: on a GPU it is on the host. A small one is prepared first, so that what
# torch sets up on first use is not counted.
MEASURE = (
    STATUS
    + """
import torch
from gemmwire_service.backends import BACKENDS
from gemmwire_service.backends.storage import nbytes
from gemmwire_service.mxfp8.weight import MxWeight

def weight(n, k):
    codes = torch.full((n, k), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return MxWeight.from_mxfp8(codes, torch.full((n, k // 32), 127, dtype=torch.uint8))

torch.set_num_threads(1)
name, n, k = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
small = BACKENDS[name]().prepare(weight(256, 512), torch.device("cpu"))
large = weight(n, k)
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
form = BACKENDS[name]().prepare(large, torch.device("cpu"))
print(status("VmHWM") - before - nbytes(form))
"""
)


@measurable
@pytest.mark.parametrize("name", KERNELS)
def test_preparing_takes_the_result_and_one_layer(name: str) -> None:
    """Guards: more than a layer beside its result, for which a GPU that is filled has no room."""
    layer = N * K + N * K // 32
    above = measured(MEASURE, name, str(N), str(K))
    assert above <= layer + SLACK, f"{above / MIB:.1f} MiB beside the result, {layer / MIB:.1f} of a layer"
