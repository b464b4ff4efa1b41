"""The weight of one layer as the bytes of a safetensors file, in memory.

    weight BF16, F16 or F32 [N, K]                                     quantized here
    weight F8_E4M3 [N, K] + weight_scale U8 or F8_E8M0 [N, ceil(K/32)] taken as it is
    bias   BF16, F16 or F32 [N], where the layer has one

Whatever the bytes are, they are read to exactly these tensors or refused: CheckpointError says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends.base import LayerSpec
from .checkpoint.base import LayerWeights, listed, shown
from .checkpoint.float_layer import quantize_layer
from .checkpoint.linear import E4M3, FLOATS
from .checkpoint.safetensors_file import TORCH_DTYPES
from .checkpoint.safetensors_header import PREFIX, TensorInfo, header_length, parse_header
from .checkpoint.scales import E8M0
from .errors import CheckpointError
from .mxfp8.format import BLOCK
from .mxfp8.weight import MxWeight

HEADER_LIMIT = 64 << 10  # bytes: three tensors take 300, the rest is __metadata__
WEIGHT, SCALE, BIAS = "weight", "weight_scale", "bias"
_WHERE = "the body"


def largest(spec: LayerSpec) -> int:
    """Bytes of the longest body that can hold the layer's weight."""
    return PREFIX + HEADER_LIMIT + 4 * (spec.n * spec.k + spec.n)


def read_weights(body: memoryview, spec: LayerSpec) -> LayerWeights:
    """Raises CheckpointError naming what is given and what is needed."""
    infos, data = _infos(body)
    _check(infos, spec)
    bias = _tensor(infos[BIAS], data).float() if BIAS in infos else None
    weight = _tensor(infos[WEIGHT], data)
    if SCALE not in infos:
        return quantize_layer(spec.name, weight, bias)
    return LayerWeights(
        spec.name, MxWeight.from_mxfp8(weight, _tensor(infos[SCALE], data), bias), "MXFP8", None
    )


def _infos(body: memoryview) -> tuple[dict[str, TensorInfo], memoryview]:
    """-> the header's entries, and the bytes behind it."""
    length = header_length(bytes(body[:PREFIX]), len(body), _WHERE)
    if length > HEADER_LIMIT:
        raise CheckpointError(
            f"{_WHERE}: a header of {length} bytes is declared; the bound is {HEADER_LIMIT} for the weight "
            "of one layer: leave out its __metadata__",
            expected=f"at most {HEADER_LIMIT}",
            got=length,
        )
    data = body[PREFIX + length :]
    return parse_header(bytes(body[PREFIX : PREFIX + length]), len(data), _WHERE), data


def _check(infos: dict[str, TensorInfo], spec: LayerSpec) -> None:
    """Names, dtypes and shapes, before any of the values is looked at."""
    _check_names(infos)
    weight, scale = infos[WEIGHT], infos.get(SCALE)
    _check_one(weight, (*FLOATS, E4M3), (spec.n, spec.k))
    if (weight.dtype == E4M3) != (scale is not None):
        raise CheckpointError(
            f"{_WHERE}: weight is {weight} {'without' if scale is None else 'and there is'} a weight_scale; "
            f"an {E4M3} weight has one, and no other has",
            expected=f"{E4M3} with weight_scale, or {', '.join(FLOATS)} without",
            got=sorted(infos),
        )
    if scale is not None:
        _check_one(scale, E8M0, (spec.n, -(-spec.k // BLOCK)))
    if (BIAS in infos) != spec.bias:
        raise CheckpointError(
            f"{_WHERE}: there is no bias, and the layer has one: send F32 [{spec.n}]; zeros are one"
            if spec.bias
            else f"{_WHERE}: there is a bias, and the layer has none: leave it out",
            expected=spec.bias,
            got=BIAS in infos,
        )
    if spec.bias:
        _check_one(infos[BIAS], FLOATS, (spec.n,))


def _check_names(infos: dict[str, TensorInfo]) -> None:
    others = [shown(name) for name in infos if name not in (WEIGHT, SCALE, BIAS)]
    if others:
        raise CheckpointError(
            f"{_WHERE}: tensors {listed(others)} are not of one layer's weight; send {WEIGHT}, {SCALE} and "
            f"{BIAS} alone, each layer by its own request",
            expected=[WEIGHT, SCALE, BIAS],
            got=others[:5],
        )
    if WEIGHT not in infos:
        raise CheckpointError(
            f"{_WHERE}: there is no tensor {WEIGHT!r}; it has {listed(list(infos)) or 'none'}",
            expected=[WEIGHT],
            got=list(infos),
        )


def _check_one(info: TensorInfo, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if info.dtype in dtypes and info.shape == shape:
        return
    raise CheckpointError(
        f"{_WHERE}: {info.name} is {info}; {' or '.join(dtypes)} {list(shape)} is needed",
        expected=f"{' or '.join(dtypes)} {list(shape)}",
        got=str(info),
    )


def _tensor(info: TensorInfo, data: memoryview) -> Tensor:
    """A view of the bytes, or, where they do not lie on a multiple of the item's size, a copy."""
    raw = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.start)
    dtype = TORCH_DTYPES[info.dtype]
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)
