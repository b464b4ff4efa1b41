"""The layers of a checkpoint as they are stored beside what is served of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gemmwire_service.checkpoint import Checkpoint, open_checkpoint
from gemmwire_service.checkpoint.base import Skipped, listed, shown
from gemmwire_service.checkpoint.float_layer import SOURCE_DTYPES
from gemmwire_service.checkpoint.schemes.base import globs
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.weight import MxWeight


@dataclass(frozen=True, eq=False)
class SourceLayer:
    """weight: BF16, F16 or F32 [N, K], unquantized; mx: what is served of it."""

    name: str
    weight: Tensor
    mx: MxWeight
    source_dtype: str


class Source:
    """A checkpoint, and the unquantized model that its MXFP8 layers were made from, if that is given.

    names: the layers that can be measured, in the order of the model. left: those that cannot, and why;
    notes: the same in one sentence.
    """

    def __init__(self, path: Path, reference: Path | None, patterns: Sequence[str]) -> None:
        """patterns: shell patterns over layer names; none is all. Raises CheckpointError."""
        self.path = path
        self.checkpoint = open_checkpoint(path, allow_unquantized=True)
        self._reference = None if reference is None else open_checkpoint(reference, allow_unquantized=True)
        found = {name: self._reason(name) for name in self._matching(patterns)}
        self.names = tuple(name for name, reason in found.items() if reason is None)
        self.left = tuple(Skipped(name, reason) for name, reason in found.items() if reason is not None)
        if not self.names:
            raise self._nothing()
        self.notes = _notes(path, self.left)

    def nbytes(self, name: str) -> int:
        other = self._other(name)
        return self.checkpoint.nbytes(name) + (other.nbytes(name) if other is not self.checkpoint else 0)

    def read(self, name: str) -> SourceLayer:
        """Raises CheckpointError."""
        other = self._other(name)
        weight = other.unquantized(name)
        mx = MxWeight.from_float(weight) if other is self.checkpoint else self.checkpoint.read(name).weight
        return SourceLayer(name, weight, mx, SOURCE_DTYPES[weight.dtype])

    def _other(self, name: str) -> Checkpoint:
        """The checkpoint that has the unquantized weight."""
        if self._reference is None or self.checkpoint.has_unquantized(name):
            return self.checkpoint
        return self._reference

    def _matching(self, patterns: Sequence[str]) -> list[str]:
        names = self.checkpoint.names()
        if not patterns:
            return list(names)
        match = globs(patterns)
        found = [name for name in names if match(name) is not None]
        if not found:
            raise CheckpointError(
                f"{self.path}: no layer matches {' or '.join(map(shown, patterns))}; it has {len(names)}: "
                + listed([shown(name) for name in names]),
                expected="a pattern such as '*.down_proj'",
                got=list(patterns),
            )
        return found

    def _reason(self, name: str) -> str | None:
        """Why a layer cannot be measured, or None: it can."""
        if self.checkpoint.has_unquantized(name):
            return None
        if self._reference is None:
            return "is stored in MXFP8: what it was made from is not here"
        if name not in self._reference.names() or not self._reference.has_unquantized(name):
            return "is stored in MXFP8, and the reference has no unquantized layer of its name"
        ours, theirs = self.checkpoint.spec(name)[:2], self._reference.spec(name)[:2]
        if ours != theirs:
            return f"is {list(ours)} in MXFP8 and {list(theirs)} in the reference"
        return None

    def _nothing(self) -> CheckpointError:
        reasons = listed([f"{shown(each.name)} {each.reason}" for each in self.left], "; ")
        way_out = "measure the model that it was made from, or name that too: --reference MODEL"
        if self._reference is not None:
            way_out = "give as --reference the model that the checkpoint was made from"
        return CheckpointError(
            f"{self.path}: no layer can be measured, because none has an unquantized weight to be held "
            f"against; {way_out}. {reasons}",
            expected="a BF16, F16 or F32 weight",
            got=f"{len(self.left)} layers in MXFP8",
        )


def _notes(path: Path, left: Sequence[Skipped]) -> tuple[str, ...]:
    if not left:
        return ()
    return (
        f"{path}: {len(left)} layers are not measured: "
        + listed([f"{shown(e.name)} {e.reason}" for e in left], "; "),
    )
