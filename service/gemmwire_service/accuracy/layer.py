"""All that is measured of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .inputs import Rows
from .output import OutputFigures, OutputMeter
from .source import SourceLayer
from .tile import tiles
from .verdict import Judged, judge
from .weight import WeightFigures, WeightMeter, mean_of


@dataclass(frozen=True)
class LayerFigures:
    """outputs: by kind of x."""

    name: str
    n: int
    k: int
    source_dtype: str
    weight: WeightFigures
    outputs: dict[str, OutputFigures]
    judged: Judged


def measure(layer: SourceLayer, inputs: Mapping[str, Rows]) -> LayerFigures:
    """inputs: by kind of x. Memory: the layer in hand, its quantized form, and pieces of a few MB."""
    weight = WeightMeter(mean_of(layer.weight))
    outputs = {kind: OutputMeter(rows) for kind, rows in inputs.items()}
    for tile in tiles(layer.weight, layer.mx):
        weight.add(tile)
        for meter in outputs.values():
            meter.add(tile)
    found = {kind: meter.figures() for kind, meter in outputs.items()}
    figures = weight.figures()
    n, k = layer.mx.n, layer.mx.k
    return LayerFigures(layer.name, n, k, layer.source_dtype, figures, found, judge(n, figures, found))
