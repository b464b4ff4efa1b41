"""A safetensors file of captured activations: for each layer, under its name, rows of x."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gemmwire_service.checkpoint.base import listed, shown
from gemmwire_service.checkpoint.linear import FLOATS
from gemmwire_service.checkpoint.safetensors_file import SafetensorsFile
from gemmwire_service.errors import CheckpointError

from .inputs import Rows

_HOW = "record them from the model of this checkpoint with gemmwire.nn.capture"


class Calibration:
    """Checked against the layers as it opens; rows are read one layer at a time.

    notes: what its user should know: rows of no layer, layers without rows.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """sizes: K of each layer that is measured, by name. Raises CheckpointError."""
        self._file = SafetensorsFile(path)
        tensors = self._file.tensors
        self._names = [name for name in sizes if name in tensors]
        if not self._names:
            raise CheckpointError(
                f"{path}: holds rows of none of the layers that are measured: it has "
                f"{listed([shown(name) for name in tensors]) or 'nothing'}, and they are "
                f"{listed([shown(name) for name in sizes])}; its tensors have to be named as the layers are: "
                + _HOW,
                expected=list(sizes)[:10],
                got=list(tensors)[:10],
            )
        for name in self._names:
            self._check(name, sizes[name])
        self.notes = self._notes(path, sizes)

    def rows(self, name: str, limit: int) -> Rows | None:
        """At most `limit` evenly spaced rows [m, K] of a layer, or None: the file has none. Raises
        CheckpointError, at a NaN or Inf too."""
        if name not in self._names:
            return None
        count = self._file.tensors[name].shape[0]
        chosen = torch.linspace(0, count - 1, min(count, limit), dtype=torch.float64).round().long().tolist()
        found = Rows(self._file.rows(name, chosen), chosen)
        _check_finite(found, self._file.where(name))
        return found

    def _check(self, name: str, k: int) -> None:
        info, where = self._file.tensors[name], self._file.where(name)
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"{where}: is {info}; rows of x are {', '.join(FLOATS)}: {_HOW}",
                expected=FLOATS,
                got=info.dtype,
            )
        if len(info.shape) != 2 or info.shape[1] != k:
            raise CheckpointError(
                f"{where}: is {info}; the layer has K={k}, so [rows, {k}] is needed: {_HOW}",
                expected=["rows", k],
                got=list(info.shape),
            )
        if info.shape[0] == 0:
            raise CheckpointError(
                f"{where}: has no rows; leave the tensor out, or {_HOW}", expected="at least 1 row", got=0
            )

    def _notes(self, path: Path, sizes: Mapping[str, int]) -> tuple[str, ...]:
        unknown = [shown(name) for name in self._file.tensors if name not in sizes]
        missing = [shown(name) for name in sizes if name not in self._names]
        notes = []
        if unknown:
            notes.append(
                f"{path}: rows of {len(unknown)} that are not measured are not used: {listed(unknown)}"
            )
        if missing:
            kept = f"has no rows of {len(missing)} layers, which are judged on drawn x"
            notes.append(f"{path}: {kept}: {listed(missing)}")
        return tuple(notes)


def _check_finite(rows: Rows, where: str) -> None:
    """Raises CheckpointError at the first number that is not finite in BF16, as x is served."""
    bad = ~rows.x.bfloat16().isfinite()
    if bad.any():
        row, column = bad.nonzero()[0].tolist()
        value = float(rows.x[row, column])
        raise CheckpointError(
            f"{where}: holds {value:g} at [{rows.numbers[row]}, {column}], which is not finite in BF16, as "
            "which x is served: such a row is answered with NaN, and has no error to be measured; leave it "
            "out, or find out why the model makes it",
            expected="|x| <= 3.39e38",
            got=f"{value:g}",
        )
