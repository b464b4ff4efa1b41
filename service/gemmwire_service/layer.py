"""A served layer: what it is, the backend that runs it, its prepared weight and its version."""

from __future__ import annotations

from dataclasses import dataclass, field

from .backends.base import Backend, LayerSpec
from .routes import Routes
from .stats import LayerStats


@dataclass(frozen=True)
class LayerError:
    """How far one forward of the layer is from its references, as ||y - ref|| / ||ref|| over the probe rows.

    `quantization` is against the unquantized weight in FP32 (None where the checkpoint had none);
    `arithmetic` is against the dequantized operands, and says that the backend computes what it should.
    """

    quantization: float | None
    arithmetic: float


@dataclass
class Layer:
    """Changed by the device thread alone once it is served; the event loop reads it."""

    spec: LayerSpec
    routes: Routes
    source: str
    source_dtype: str
    version: int = 1
    error: LayerError | None = None
    stats: LayerStats = field(default_factory=LayerStats)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def backend(self) -> Backend:
        """The one that runs the layer; single buckets may have another (`routes.fallbacks`)."""
        return self.routes.selection.backend
