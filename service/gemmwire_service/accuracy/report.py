"""What was measured of a checkpoint, as one document: for JSON, for the page and for the table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemmwire_service import __version__
from gemmwire_service.checkpoint.base import Skipped

from .layer import LayerFigures
from .output import OutputFigures
from .verdict import LABELS, LIMITS, RULE, VERDICTS
from .weight import WeightFigures

SCHEMA = 1  # raise it when a key changes its meaning or goes


@dataclass(frozen=True)
class Measured:
    """What a run measured, and of what."""

    checkpoint: str
    reference: str | None
    calibration: str | None
    rows: int
    seed: int
    layers: Sequence[LayerFigures]
    left: Sequence[Skipped]
    notes: Sequence[str]


def document(measured: Measured) -> dict[str, Any]:
    """Numbers that are not finite are "Infinity" and "-Infinity", which JSON has no numbers for."""
    counts = Counter(layer.judged.verdict for layer in measured.layers)
    found = {
        "schema": SCHEMA,
        "gemmwire": __version__,
        "checkpoint": measured.checkpoint,
        "reference": measured.reference,
        "calibration": measured.calibration,
        "rows": measured.rows,
        "seed": measured.seed,
        "rule": RULE,
        "limits": [asdict(limit) for limit in LIMITS],
        "labels": LABELS,
        "summary": {verdict: counts[verdict] for verdict in VERDICTS},
        "notes": list(measured.notes),
        "layers": [_layer(layer) for layer in measured.layers],
        "not_measured": [{"name": each.name, "reason": each.reason} for each in measured.left],
    }
    finite: dict[str, Any] = _finite(found)
    return finite


def text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def _layer(layer: LayerFigures) -> dict[str, Any]:
    return {
        "name": layer.name,
        "n": layer.n,
        "k": layer.k,
        "source_dtype": layer.source_dtype,
        "verdict": layer.judged.verdict,
        "reasons": list(layer.judged.reasons),
        "weight": _weight(layer.weight),
        "outputs": {kind: _output(figures) for kind, figures in layer.outputs.items()},
    }


def _weight(figures: WeightFigures) -> dict[str, Any]:
    return {
        **figures.fidelity.figures(),
        "largest": figures.largest,
        "kurtosis": figures.kurtosis,
        "zero_rows": figures.zero_rows,
        "zero_blocks": figures.zero_blocks,
        "exponents": figures.exponents,
        "channel_error": asdict(figures.channels),
        "worst_channels": [{"row": row, "relative_error": error} for row, error in figures.worst_channels],
        "worst_blocks": [asdict(block) for block in figures.worst_blocks],
    }


def _output(figures: OutputFigures) -> dict[str, Any]:
    return {
        "rows": figures.rows,
        "row_error": asdict(figures.row_error),
        "relative_error": figures.relative_error,
        "weight_only": figures.weight_only,
        "zero_rows": figures.zero_rows,
        "worst_rows": [{"row": row, "relative_error": error} for row, error in figures.worst_rows],
        "x": {**figures.x.figures(), "largest": figures.x_largest},
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
