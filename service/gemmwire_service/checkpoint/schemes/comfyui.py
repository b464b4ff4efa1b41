"""MXFP8 as ComfyUI writes it, which cannot be read: its scales are in the 128x4 layout of the kernel.

Their shape is that of scales in linear order, so names, dtypes and shapes do not show it. The declaration
does: `_quantization_metadata` in the header of the file, {"layers": {module: {"format": "mxfp8"}}}, or a
tensor `<module>.comfy_quant` beside the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

METADATA, MARKER = "_quantization_metadata", "comfy_quant"


def declaration(module: str, tensors: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """What says that the scales of this module are ComfyUI's, or None."""
    if f"{module}.{MARKER}" in tensors:
        return f"the tensor {module}.{MARKER}"
    return f"{METADATA} in the file's header" if METADATA in metadata else None
