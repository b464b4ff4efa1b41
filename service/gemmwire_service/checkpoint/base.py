"""What a checkpoint of any format offers: its linear layers by name, their sizes, and one at a time.

A checkpoint opens by reading names and shapes only. `read` loads, checks and, where the weight is a float,
quantizes one layer, so that loading a model needs the memory of the result and of the layer in hand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight

_SHOWN = 10  # entries of a list that an error message spells out
_SHOWN_CHARS = 120  # a tensor name in a hostile file may be megabytes long
_NAME_CHARS = 1024  # of a layer; a server takes 64 KiB of request line and headers


@dataclass(frozen=True)
class Skipped:
    """A tensor of the checkpoint that is not served, and why."""

    name: str
    reason: str


class LayerShape(NamedTuple):
    """Size of a layer before it is read: N out, K in (unpadded)."""

    n: int
    k: int
    has_bias: bool


@dataclass(frozen=True, eq=False)
class Probe:
    """What the unquantized layer answers to a few fixed rows, so that a server can state its error without W.

    x is BF16 [4, K]; y is FP32 [4, N], x @ W.T + b computed in FP32 from the weight as it was stored. A fused
    layer has the rows of each of its parts, and NaN for what the other parts answer to them.
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer, ready for `Backend.prepare`. `probe` and `fidelity` are None if no unquantized weight is
    stored; `fidelity` is of evenly spaced rows of the weight (`Fidelity.sample`)."""

    name: str
    weight: MxWeight
    source_dtype: str  # BF16, F16, F32 or MXFP8
    probe: Probe | None
    fidelity: Fidelity | None = None


class Checkpoint(Protocol):
    """The linear layers of one model."""

    @property
    def format(self) -> str: ...

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Every tensor that is neither a served weight nor part of one."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided about this checkpoint and its user should know: transposed, tied, ..."""

    def names(self) -> tuple[str, ...]:
        """Layers in the order of the model. Never empty: opening a checkpoint without one fails."""

    def spec(self, name: str) -> LayerShape:
        """Raises CheckpointError for a name that is not in `names()`."""

    def nbytes(self, name: str) -> int:
        """Bytes that `read` reads. Raises as `spec` does."""

    def read(self, name: str) -> LayerWeights:
        """Loads one layer. Raises CheckpointError naming file and tensor when it cannot be served."""

    def has_unquantized(self, name: str) -> bool:
        """Whether the layer is stored as floats, and not in MXFP8. Raises as `spec` does."""

    def unquantized(self, name: str) -> Tensor:
        """The finite float weight [N, K] that `read` quantizes, in the dtype that it is stored in. Raises as
        `read` does, and CheckpointError where MXFP8 is all that is stored."""


def shown(name: str) -> str:
    """A tensor's name for a message: quoted, escaped, bounded."""
    return repr(name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "...")


def listed(entries: Sequence[str], separator: str = ", ") -> str:
    """The first few of a list, and how many more there are."""
    more = len(entries) - _SHOWN
    return separator.join(entries[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")


def layer_name(module: str, source: object) -> str:
    """`module` if it can be a layer's name, which is one segment of a URL."""
    printable = len(module) <= _NAME_CHARS and module.isprintable()
    if "/" in module or module in ("", ".", "..") or not printable:
        raise CheckpointError(
            f"{source}: layer name {shown(module)} cannot be one segment of a URL; rename its tensors "
            f"(no '/', no control characters, at most {_NAME_CHARS} characters, not empty, not '.' or '..')",
            expected="a name without '/'",
            got=module[:_SHOWN_CHARS],
        )
    return module


def unknown_layer(name: str, names: Collection[str], source: object) -> CheckpointError:
    return CheckpointError(
        f"{source}: no layer {shown(name)}; it has {len(names)}: {listed([shown(n) for n in names])}",
        got=name[:_SHOWN_CHARS],
    )


def no_layer(skipped: Sequence[Skipped], source: object) -> CheckpointError:
    """The error of a checkpoint in which nothing can be served; it lists what was skipped."""
    found = listed([f"{shown(s.name)}: {s.reason}" for s in skipped], "; ")
    return CheckpointError(
        f"{source}: no linear layer to serve; a 2-D tensor named <module>.weight is needed. "
        + (f"Skipped {len(skipped)}: {found}" if skipped else "It holds no tensor at all"),
        expected="at least one 2-D <module>.weight",
        got=f"{len(skipped)} tensors, all skipped",
    )
