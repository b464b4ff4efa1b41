"""The JSON forms of the protocol as pydantic models: what the control plane answers and /docs shows.

The infer route decodes with `gemmwire.wire`, which is stricter and faster; its models here are documentation.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Scalar = bool | int | float | str


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1 is a free dimension")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class PassedOver(BaseModel):
    backend: str
    reason: str


class Fallback(BaseModel):
    bucket: int
    backend: str = Field(description="the backend that failed at this bucket")
    reason: str


class BucketPlan(BaseModel):
    bucket: int
    backend: str
    layout: str = Field(description="of the scales of x; empty where the backend has no choice")
    quantizer: str = Field(description="of x; empty where the backend has no choice")
    graph: bool = Field(description="it runs as a CUDA graph")


class EagerBucket(BaseModel):
    bucket: int
    reason: str


class FusedPart(BaseModel):
    """Columns start..stop of y, which the output `name` holds too."""

    name: str
    start: int
    stop: int


class WeightFidelity(BaseModel):
    """What quantizing cost the weight; shares are of the elements of the rows that were looked at."""

    rows: int = Field(description="evenly spaced rows of the weight that were looked at, all of a small one")
    sqnr_db: float | None = Field(description="10 log10 of signal over noise; none where nothing was lost")
    relative_error: float = Field(description="||w - w'|| / ||w||")
    zeros: float
    saturated: float = Field(description="above the largest number under their block's scale")
    flushed: float = Field(description="not zero, and their code is")
    subnormal: float = Field(description="with 1 to 3 significant bits, not 4")


class ModelConfig(BaseModel):
    """A served layer in full: y[..., n] = x[..., k] @ W.T + b."""

    name: str
    platform: str
    version: str
    n: int
    k: int
    bias: bool
    parts: list[FusedPart] = Field(description="the layers that it is fused from (--fuse)")
    backend: str
    passed_over: list[PassedOver] = Field(
        description="better backends, and why they do not run this layer here"
    )
    fallbacks: list[Fallback] = Field(description="buckets that the backend failed at and another runs")
    plans: list[BucketPlan] = Field(description="what runs each bucket")
    eager: list[EagerBucket] = Field(description="buckets that a CUDA device runs without a graph, and why")
    graph_bytes: int = Field(description="device memory that the graphs take")
    device: str
    source: str = Field(description="where the weight came from")
    source_dtype: str
    scale_rule: str = "ceil(log2(amax / 448)), E8M0 per 32 along K"
    buckets: list[int] = Field(description="M is rounded up to one of these")
    max_batch_size: int = 0
    quantization_error: float | None = Field(
        description="||y - ref|| / ||ref|| against the unquantized weight"
    )
    arithmetic_error: float | None = Field(description="the same against the dequantized operands")
    weight_fidelity: WeightFidelity | None = Field(
        description="of this version's weight; none where it came in MXFP8"
    )


class ModelIndexEntry(BaseModel):
    name: str
    version: str
    state: str
    reason: str
    n: int
    k: int
    bias: bool
    backend: str


class CheckpointIndexEntry(BaseModel):
    """A model of the repository, whose layers have entries of their own."""

    name: str
    version: str = ""
    state: str = Field(description="READY, UNAVAILABLE, LOADING or UNLOADING")
    reason: str
    layers: int = Field(description="how many of it are served")


class RepositoryIndexRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    ready: bool | None = None


class RepositoryRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    parameters: dict[str, Any] = Field({}, description="unload_dependents, ignored; of a refit, from")


class LoadResult(BaseModel):
    name: str
    layers: list[str] = Field(description="the model's layers that are served now")


class ModelStatistics(BaseModel):
    model_stats: list[dict[str, Any]]


class RefitSeconds(BaseModel):
    read: float = Field(description="read, checked and, from a float, quantized")
    prepare: float = Field(description="brought into the form that the backends compute with")
    trial: float = Field(description="one forward, judged")
    exchange: float = Field(description="put in place of the old, with the wait for forwards before it")


class RefitResult(BaseModel):
    """A layer whose weight was replaced: every answer of `version` was computed with the new one."""

    name: str
    version: str
    previous_version: str
    source_dtype: str = Field(description="BF16, F16, F32 or MXFP8")
    quantization_error: float | None = Field(description="as in config; none for MXFP8")
    arithmetic_error: float
    seconds: RefitSeconds


class ModelRefitResult(BaseModel):
    name: str
    source: str = Field(description="the model of the root that the weights are from")
    layers: list[RefitResult]


class SystemRegionForm(BaseModel):
    """Part of an object of POSIX shared memory, which the client has made."""

    model_config = ConfigDict(strict=True, extra="ignore")

    key: str = Field(description="the object's name, as of shm_open")
    offset: int = Field(0, ge=0, lt=1 << 63)
    byte_size: int = Field(ge=1, lt=1 << 63)
    held: bool = Field(
        False, description="the client keeps a shared flock on the object; the region goes with it"
    )


class SystemRegion(BaseModel):
    name: str
    key: str
    offset: int
    byte_size: int


class RawHandle(BaseModel):
    b64: str = Field(max_length=1024)


class CudaRegionForm(BaseModel):
    """Memory of a GPU, by the handle that the CUDA call for inter-process memory gave."""

    model_config = ConfigDict(strict=True, extra="ignore")

    raw_handle: RawHandle
    device_id: int
    byte_size: int = Field(ge=1, lt=1 << 63)


class CudaRegion(BaseModel):
    name: str
    device_id: int
    byte_size: int


class Problem(BaseModel):
    """Any answer that is not 2xx."""

    error: str = Field(description="what was given, what is needed, the way out")
    code: str
    expected: Any = None
    got: Any = None
    request_id: str = ""


class InferInput(BaseModel):
    name: str = "x"
    shape: list[int]
    datatype: str = Field(description="BF16, FP16 or FP32")
    parameters: dict[str, Scalar] | None = Field(None, description="binary_data_size for a binary tensor")
    data: list[Any] | None = Field(
        None, description='numbers, flat or nested; "NaN", "Infinity", "-Infinity"'
    )


class InferOutput(BaseModel):
    name: str = "y"
    parameters: dict[str, Scalar] | None = Field(None, description="binary_data, datatype")


class InferRequestForm(BaseModel):
    id: str | None = None
    parameters: dict[str, Scalar] | None = Field(
        None, description="timeout (microseconds), minimum_version, binary_data_output"
    )
    inputs: list[InferInput]
    outputs: list[InferOutput] | None = None


class InferResponseForm(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Scalar] | None = Field(None, description="backend, bucket, queue_us, device_us")
    outputs: list[InferInput]
