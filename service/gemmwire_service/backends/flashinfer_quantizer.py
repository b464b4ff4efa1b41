"""FlashInfer's two quantizers of x, which give the same bytes, and where they put the scales."""

from __future__ import annotations

import logging

from torch import Tensor

from gemmwire_service.backends import flashinfer_package as package
from gemmwire_service.mxfp8.format import BLOCK
from gemmwire_service.mxfp8.layout import ScaleLayout

CUDA = "cuda"  # compiled by nvcc, stable
CUTE_DSL = "cute-dsl"  # compiled at the first call by nvidia-cutlass-dsl, experimental in FlashInfer

log = logging.getLogger("gemmwire.flashinfer")

_SF_LAYOUTS = {ScaleLayout.R8C4: "layout_8x4", ScaleLayout.R128C4: "layout_128x4"}


class Quantizer:
    """What the backends quantize x with; a cute-dsl that is missing or failed once is not tried again."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Those that are here, the first guess first."""
        if not self._names:
            self._names = (CUDA, CUTE_DSL)
            if (reason := package.no_cute_dsl()) is not None:
                self._give_up(reason)
        return self._names

    def quantize(self, x: Tensor, layout: ScaleLayout, name: str) -> tuple[Tensor, Tensor]:
        """x: BF16 [m, K], contiguous, K a multiple of 32, m at least 1.

        Returns float8_e4m3fn [m, K] and uint8 [scale_size(layout, m, K/32)]. NaN and Inf become 448.
        """
        if name == CUTE_DSL and CUTE_DSL in self.names():
            try:
                return _quantize(x, layout, CUTE_DSL)
            except Exception as error:  # an experimental compiler raises anything
                self._give_up(f"{type(error).__name__}: {error}")
        return _quantize(x, layout, CUDA)

    def _give_up(self, reason: str) -> None:
        self._names = (CUDA,)
        log.warning("FlashInfer's cuda quantizer is used in place of its cute-dsl one: %s", reason)


QUANTIZER = Quantizer()  # one, so that what failed for one layer is not tried for the next


def _quantize(x: Tensor, layout: ScaleLayout, backend: str) -> tuple[Tensor, Tensor]:
    import flashinfer

    codes, scales = flashinfer.mxfp8_quantize(
        input=x,
        is_sf_swizzled_layout=True,
        alignment=BLOCK,
        backend=backend,
        sf_swizzle_layout=getattr(flashinfer.SfLayout, _SF_LAYOUTS[layout]),
    )
    return codes, scales
