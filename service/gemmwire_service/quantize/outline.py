"""What a quantized checkpoint will hold, known before a weight is read: which layers, and which tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gemmwire_service.checkpoint.base import listed
from gemmwire_service.checkpoint.linear import E4M3, FLOATS, Linear
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.safetensors_header import TensorInfo
from gemmwire_service.checkpoint.safetensors_writer import NewTensor
from gemmwire_service.checkpoint.schemes.base import globs
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.format import BLOCK

SCALE = "weight_scale"
_HEAD = "lm_head"
# Modules that vLLM and SGLang run unquantized, or that lose more by 8 bits than they are worth: the output
# layer, what routes tokens to experts, and all of a model that is not its language model.
EXCLUDED = (
    "lm_head",
    "*.lm_head",
    "output_layer",
    "*router*",
    "*.gate",
    "*shared_expert_gate",
    "*conv1d*",
    "*linear_attn.in_proj_a",
    "*linear_attn.in_proj_b",
    "*vision_tower*",
    "*vision_model*",
    "*visual*",
    "*embed_vision*",
    "*multi_modal_projector*",
    "mtp.*",
)


@dataclass(frozen=True)
class Step:
    """What is read and written together: a copied tensor, or a weight with its scales.

    layer: the layer that is quantized, or None for a copy. nbytes: what is read.
    """

    tensors: tuple[NewTensor, ...]
    layer: str | None
    nbytes: int


@dataclass(frozen=True)
class Outline:
    """steps: in the order of the source. excluded: modules that stay as they are, for the config.
    notes: why, for people."""

    steps: tuple[Step, ...]
    excluded: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def layers(self) -> int:
        return sum(step.layer is not None for step in self.steps)

    @property
    def read_bytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def written_bytes(self) -> int:
        return sum(tensor.nbytes for step in self.steps for tensor in step.tensors)


def outline(checkpoint: SafetensorsCheckpoint, patterns: Sequence[str]) -> Outline:
    """`patterns`: shell patterns over module names that stay unquantized. Raises CheckpointError."""
    against = {linear.name: reason for linear in checkpoint.linears.values() if (reason := _against(linear))}
    excluded = globs(patterns)
    kept = {name: entry for name in checkpoint.linears if (entry := excluded(name)) is not None}
    taken = {
        linear.weight.name: linear
        for linear in checkpoint.linears.values()
        if linear.name not in against and (linear.name not in kept or linear.scale is not None)
    }
    if not taken:
        said = [f"{name} {reason}" for name, reason in against.items()]
        said += [f"{name} is excluded by {entry!r}" for name, entry in kept.items()]
        raise CheckpointError(
            f"{checkpoint.path}: no layer to quantize: {listed(said, '; ')}",
            expected=f"a 2-D weight with K a multiple of {BLOCK}",
        )
    _check_the_rest(checkpoint, taken)
    scales = {linear.scale.name for linear in taken.values() if linear.scale is not None}
    steps = tuple(_steps(_infos(checkpoint), taken, scales))
    # Engines look for a quantized output layer where none is stored, because it is tied to the embedding.
    tied = () if f"{_HEAD}.weight" in checkpoint.files else (_HEAD,)
    left = (*tied, *against, *(name for name in kept if name not in against), *_stacked(checkpoint))
    quantized = {linear.name for linear in taken.values()}
    return Outline(
        steps,
        tuple(dict.fromkeys(name for name in left if name not in quantized)),
        tuple(f"{name} {reason}; it is copied as it is" for name, reason in against.items()),
    )


def _against(linear: Linear) -> str | None:
    """Why a layer cannot be written in these formats, or None."""
    if linear.transposed:
        return "is stored [in, out], which the formats do not have"
    if linear.k % BLOCK:
        return f"has K={linear.k}, not a multiple of {BLOCK}, which no engine loads"
    return None


def _check_the_rest(checkpoint: SafetensorsCheckpoint, taken: Collection[str]) -> None:
    """Raises CheckpointError at a weight that would be copied, and that the new config would misdescribe."""
    for name, file in checkpoint.files.items():
        info = file.tensors[name]
        if name.endswith(".weight") and name not in taken and info.dtype not in (*FLOATS, "F64"):
            raise CheckpointError(
                f"{file.where(name)} is {info}, of another quantization or of a K that is no multiple of "
                f"{BLOCK}: it can be neither quantized nor copied under a config that declares MXFP8; give "
                "the unquantized model",
                expected=FLOATS,
                got=info.dtype,
            )


def _infos(checkpoint: SafetensorsCheckpoint) -> Iterator[TensorInfo]:
    """Every tensor of the model in the order of the files and of the bytes in them."""
    files = dict.fromkeys(checkpoint.files.values())
    for file in files:
        yield from (info for name, info in file.tensors.items() if checkpoint.files.get(name) is file)


def _steps(infos: Iterable[TensorInfo], taken: dict[str, Linear], scales: set[str]) -> Iterator[Step]:
    for info in infos:
        linear = taken.get(info.name)
        if linear is not None:
            scale = NewTensor(f"{linear.name}.{SCALE}", "U8", (linear.n, linear.k // BLOCK))
            weight = NewTensor(info.name, E4M3, (linear.n, linear.k))
            read = info.nbytes + (linear.scale.nbytes if linear.scale else 0)
            yield Step((weight, scale), linear.name, read)
        elif info.name not in scales:
            yield Step((NewTensor(info.name, info.dtype, info.shape),), None, info.nbytes)


def _stacked(checkpoint: SafetensorsCheckpoint) -> Iterator[str]:
    """Modules that hold experts in one 3-D tensor: engines would look for quantized ones."""
    for name, file in checkpoint.files.items():
        info = file.tensors[name]
        if len(info.shape) == 3 and info.dtype in FLOATS:
            yield name.rpartition(".")[0]
