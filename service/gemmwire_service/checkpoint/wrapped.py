"""A checkpoint seen through another: cached, checked, fused."""

from __future__ import annotations

from torch import Tensor

from gemmwire_service.checkpoint.base import Checkpoint, LayerShape, LayerWeights, Skipped


class WrappedCheckpoint:
    """A `Checkpoint` that answers as the one within, but for what a subclass does otherwise."""

    def __init__(self, within: Checkpoint) -> None:
        self._within = within

    @property
    def format(self) -> str:
        return self._within.format

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        return self._within.skipped

    @property
    def notes(self) -> tuple[str, ...]:
        return self._within.notes

    def names(self) -> tuple[str, ...]:
        return self._within.names()

    def spec(self, name: str) -> LayerShape:
        return self._within.spec(name)

    def nbytes(self, name: str) -> int:
        return self._within.nbytes(name)

    def read(self, name: str) -> LayerWeights:
        return self._within.read(name)

    def has_unquantized(self, name: str) -> bool:
        return self._within.has_unquantized(name)

    def unquantized(self, name: str) -> Tensor:
        return self._within.unquantized(name)
