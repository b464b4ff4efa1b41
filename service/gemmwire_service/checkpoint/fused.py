"""Layers that take the same x, fused into one: q, k and v, or gate and up, by one GEMM.

Weights are concatenated along N as they are stored, before any backend pads or shuffles them, so that a fused
layer is one weight like any other and its parts are columns of its y.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemmwire_service.checkpoint.base import (
    Checkpoint,
    LayerShape,
    LayerWeights,
    Probe,
    listed,
    unknown_layer,
)
from gemmwire_service.checkpoint.wrapped import WrappedCheckpoint
from gemmwire_service.fusing import Rule
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight


@dataclass(frozen=True)
class _Group:
    """Layers to be fused, by their full names."""

    rule: Rule
    names: tuple[str, ...]


class FusedCheckpoint(WrappedCheckpoint):
    """A `Checkpoint` whose layers are fused by rules, where they have one K and all or none a bias."""

    def __init__(self, checkpoint: Checkpoint, rules: Sequence[Rule]) -> None:
        super().__init__(checkpoint)
        self._groups: dict[str, _Group] = {}
        refused: list[str] = []
        there = set(checkpoint.names())
        for rule in rules:
            for module in _modules(checkpoint.names(), rule):
                group = _Group(rule, tuple(module + part for part in rule.parts))
                why = self._reason(module + rule.name, group, there)
                if why is None:
                    self._groups[module + rule.name] = group
                else:
                    refused.append(f"{module}{rule}: {why}")
        fused = {part: name for name, group in self._groups.items() for part in group.names}
        self._names = dict.fromkeys(fused.get(name, name) for name in checkpoint.names())
        self._notes = _notes(self._groups, rules, refused)

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *self._notes)

    def names(self) -> tuple[str, ...]:
        """A fused layer stands where the first of its parts did."""
        return tuple(self._names)

    def spec(self, name: str) -> LayerShape:
        shapes = [self._within.spec(part) for part in self._parts(name)]
        return LayerShape(sum(shape.n for shape in shapes), shapes[0].k, shapes[0].has_bias)

    def nbytes(self, name: str) -> int:
        return sum(self._within.nbytes(part) for part in self._parts(name))

    def read(self, name: str) -> LayerWeights:
        if name not in self._groups:
            return self._within.read(self._parts(name)[0])
        return _fuse(name, [self._within.read(part) for part in self._parts(name)])

    def has_unquantized(self, name: str) -> bool:
        return all(self._within.has_unquantized(part) for part in self._parts(name))

    def unquantized(self, name: str) -> Tensor:
        """Parts of different dtypes become the one that holds both."""
        return torch.cat([self._within.unquantized(part) for part in self._parts(name)])

    def parts(self, name: str) -> tuple[tuple[str, int], ...]:
        """Name and rows of each layer that `name` is fused from, in order; none for one that is not."""
        group = self._groups.get(name)
        if group is None:
            return ()
        rows = (self._within.spec(part).n for part in group.names)
        return tuple(zip(group.rule.parts, rows, strict=True))

    def _parts(self, name: str) -> tuple[str, ...]:
        if name in self._groups:
            return self._groups[name].names
        if name not in self._names:
            raise unknown_layer(name, self._names, "the fused model")
        return (name,)

    def _reason(self, name: str, group: _Group, there: set[str]) -> str | None:
        """Why these layers stay apart."""
        missing = [part for part in group.names if part not in there]
        if missing:
            return f"there is no {listed(missing)}"
        if name in there:
            return f"there is a layer {name} already"
        shapes = [self._within.spec(part) for part in group.names]
        if len({shape.k for shape in shapes}) > 1:
            return f"K differs: {', '.join(str(shape.k) for shape in shapes)}"
        if len({shape.has_bias for shape in shapes}) > 1:
            biased = [part for part, shape in zip(group.rule.parts, shapes, strict=True) if shape.has_bias]
            return f"only {', '.join(biased)} has a bias"
        return None


def _modules(names: Sequence[str], rule: Rule) -> tuple[str, ...]:
    """The modules, with a dot at the end, that have at least two of the rule's parts."""
    found: Counter[str] = Counter()
    for name in names:
        module, dot, last = name.rpartition(".")
        if last in rule.parts:
            found[module + dot] += 1
    return tuple(module for module, count in found.items() if count > 1)


def _notes(groups: dict[str, _Group], rules: Sequence[Rule], refused: Sequence[str]) -> tuple[str, ...]:
    counts = Counter(str(group.rule) for group in groups.values())
    notes = [f"{count} layers are fused by {rule}" for rule, count in counts.items()]
    if not groups:
        notes.append(f"no layers are fused by {listed([str(rule) for rule in rules])}")
    if refused:
        notes.append(f"{len(refused)} are not fused: {listed(refused, '; ')}")
    return tuple(notes)


def _fuse(name: str, parts: Sequence[LayerWeights]) -> LayerWeights:
    weights = [part.weight for part in parts]
    biases = [weight.bias for weight in weights if weight.bias is not None]
    weight = MxWeight(
        torch.cat([each.codes.view(torch.uint8) for each in weights]).view(torch.float8_e4m3fn),
        torch.cat([each.scales for each in weights]),
        torch.cat(biases) if biases else None,
        weights[0].k,
    )
    dtypes = dict.fromkeys(part.source_dtype for part in parts)
    known = [part.fidelity for part in parts if part.fidelity is not None]
    fidelity = Fidelity.total(known) if len(known) == len(parts) else None
    return LayerWeights(name, weight, "+".join(dtypes), _probe(parts), fidelity)


def _probe(parts: Sequence[LayerWeights]) -> Probe | None:
    """The rows of every part's probe; what the other parts answer to them is not known, hence NaN."""
    known = [(part, part.probe) for part in parts if part.probe is not None]
    if not known:
        return None
    n = sum(part.weight.n for part in parts)
    rows: list[Tensor] = []
    at = 0
    for part in parts:
        if part.probe is not None:
            y = torch.full((len(part.probe.x), n), torch.nan)
            y[:, at : at + part.weight.n] = part.probe.y
            rows.append(y)
        at += part.weight.n
    return Probe(torch.cat([probe.x for _, probe in known]), torch.cat(rows))
