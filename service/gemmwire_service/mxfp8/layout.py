"""Where a kernel looks for the scale of (row, block of K), and for a row of a shuffled weight.

Scales come as a matrix uint8 [m, c], one byte per row and block of K (c = K/32). The layouts, as byte offsets
into a flat array, with cp = c rounded up to a multiple of 4:

    linear   r*c + b
    8x4      (r//8)*8*cp     + (b//4)*32  + (r%8)*4   + b%4
    128x4    (r//128)*128*cp + (b//4)*512 + (r%32)*16 + ((r%128)//32)*4 + b%4

They are those of FlashInfer's `SfLayout`; rows and blocks that pad a tile hold byte 0.
The shuffle is FlashInfer's `shuffle_matrix_a` with an epilogue tile of 128 rows: within each 32 rows, row s
goes to 8*(s%4) + s//4, so that the TensorRT-LLM epilogue stores contiguous vectors. The kernel undoes it in
its output.
"""

from __future__ import annotations

from enum import Enum

from torch import Tensor

_COLUMNS = 4  # of a tile, in either tiled layout
_GROUP = 32  # rows that the shuffle permutes among themselves


class ScaleLayout(str, Enum):
    LINEAR = "linear"
    R8C4 = "8x4"
    R128C4 = "128x4"

    @property
    def tile_rows(self) -> int:
        return {"linear": 1, "8x4": 8, "128x4": 128}[self.value]


def round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def scale_size(layout: ScaleLayout, m: int, c: int) -> int:
    """Bytes of the flat array that holds the scales of m rows of c blocks."""
    rows, columns = _padded(layout, m, c)
    return rows * columns


def swizzle(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """uint8 [m, c] -> uint8 [scale_size(layout, m, c)]."""
    m, c = scales.shape
    if layout is ScaleLayout.LINEAR:
        return scales.reshape(-1)
    rows, columns = _padded(layout, m, c)
    padded = scales.new_zeros(rows, columns)
    padded[:m, :c] = scales
    if layout is ScaleLayout.R8C4:
        tiles = padded.view(rows // 8, 8, columns // _COLUMNS, _COLUMNS).permute(0, 2, 1, 3)
    else:
        tiles = padded.view(rows // 128, 4, 32, columns // _COLUMNS, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1)


def unswizzle(flat: Tensor, layout: ScaleLayout, m: int, c: int) -> Tensor:
    """uint8 [scale_size(layout, m, c)] -> uint8 [m, c]. Raises ValueError for another size."""
    size = scale_size(layout, m, c)
    if flat.shape != (size,):
        raise ValueError(
            f"{list(flat.shape)} bytes are not the {layout.value} scales of {m} rows of {c} blocks: those "
            f"are [{size}]"
        )
    rows, columns = _padded(layout, m, c)
    if layout is ScaleLayout.LINEAR:
        return flat.view(m, c)
    if layout is ScaleLayout.R8C4:
        tiles = flat.view(rows // 8, columns // _COLUMNS, 8, _COLUMNS).permute(0, 2, 1, 3)
    else:
        tiles = flat.view(rows // 128, columns // _COLUMNS, 32, 4, _COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)[:m, :c]


def shuffle_rows(matrix: Tensor) -> Tensor:
    """[n, ...] -> [n, ...], any dtype. Raises ValueError unless n is a multiple of 32."""
    return _regroup(matrix, 8, 4)


def unshuffle_rows(matrix: Tensor) -> Tensor:
    """The inverse of shuffle_rows."""
    return _regroup(matrix, 4, 8)


def shuffle_scales(scales: Tensor) -> Tensor:
    """Weight scales uint8 [n, c] -> flat uint8 [n * cp]: rows shuffled as the weight's, then 128x4.

    FlashInfer's `shuffle_matrix_sf_a`. Raises ValueError unless n is a multiple of 128: pad with rows of
    zeros first.
    """
    if scales.shape[0] % 128:
        raise ValueError(
            f"N={scales.shape[0]} is not a multiple of 128: pad weight and scales with zero rows first"
        )
    return swizzle(shuffle_rows(scales), ScaleLayout.R128C4)


def unshuffle_scales(flat: Tensor, n: int, c: int) -> Tensor:
    """The inverse of shuffle_scales."""
    return unshuffle_rows(unswizzle(flat, ScaleLayout.R128C4, n, c))


def _padded(layout: ScaleLayout, m: int, c: int) -> tuple[int, int]:
    columns = c if layout is ScaleLayout.LINEAR else round_up(c, _COLUMNS)
    return round_up(m, layout.tile_rows), columns


def _regroup(matrix: Tensor, outer: int, inner: int) -> Tensor:
    if matrix.shape[0] % _GROUP:
        raise ValueError(f"{matrix.shape[0]} rows are not a multiple of {_GROUP}: pad with zero rows first")
    groups = matrix.reshape(-1, outer, inner, *matrix.shape[1:])
    return groups.transpose(1, 2).reshape(matrix.shape)
