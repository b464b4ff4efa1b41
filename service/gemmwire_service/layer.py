"""A served layer: what it is, the backend that runs it, its prepared weight and its version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .backends.base import Backend, LayerSpec
from .mxfp8.fidelity import Fidelity
from .routes import Routes
from .stats import LayerStats

if TYPE_CHECKING:
    from .program import Program


@dataclass(frozen=True)
class LayerError:
    """How far one forward of the layer is from its references, as ||y - ref|| / ||ref|| over the probe rows.

    `quantization` is against the unquantized weight in FP32 (None where the checkpoint had none);
    `arithmetic` is against the dequantized operands, and says that the backend computes what it should.
    """

    quantization: float | None
    arithmetic: float


class Measured(NamedTuple):
    """What quantizing cost the weight of one version of a layer."""

    version: int
    fidelity: Fidelity


@dataclass(frozen=True)
class EagerBucket:
    """A bucket that a CUDA device runs call by call, and why not as a graph."""

    bucket: int
    reason: str


@dataclass(frozen=True)
class GraphFacts:
    """The graphs of a layer: the buckets that have none, and the device memory that the others take."""

    eager: tuple[EagerBucket, ...] = ()
    nbytes: int = 0


@dataclass
class Layer:
    """Changed by the device thread alone once it is served; the event loop reads it.

    `model`: the name of the checkpoint that it is of, "" where that has none.
    """

    spec: LayerSpec
    routes: Routes
    source: str
    source_dtype: str
    version: int = 1
    error: LayerError | None = None
    graphs: GraphFacts | None = None  # None on a CPU, which has none
    programs: dict[int, Program] = field(default_factory=dict)  # by bucket, on a CUDA device
    stats: LayerStats = field(default_factory=LayerStats)
    model: str = ""
    measured: Measured | None = None  # None where the checkpoint had no unquantized weight

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def backend(self) -> Backend:
        """The one that runs the layer; single buckets may have another (`routes.fallbacks`)."""
        return self.routes.selection.backend

    def fidelity_of(self, version: int) -> Fidelity | None:
        """On any thread, while a refit changes the layer: never those of another version's weight."""
        measured = self.measured
        return measured.fidelity if measured is not None and measured.version == version else None

    def number(self, version: int) -> None:
        """Before it is served: the version that its weight has, where one of its name was served before."""
        self.version = version
        if self.measured is not None:
            self.measured = self.measured._replace(version=version)

    @property
    def graph_count(self) -> int:
        return sum(program.captured for program in self.programs.values())

    def has_graph(self, bucket: int) -> bool:
        program = self.programs.get(bucket)
        return program is not None and program.captured
