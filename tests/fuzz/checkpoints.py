"""Weights: the safetensors body of a refit, and a checkpoint of every format on disk."""

from __future__ import annotations

import atexit
import io
import json
import os
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz.effort import FOLDER, in_memory
from fuzz.target import Target, quoted
from gemmwire_service.backends.base import LayerSpec
from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.checkpoint.safetensors_header import DTYPE_BITS
from gemmwire_service.errors import CheckpointError
from gemmwire_service.safetensors_body import read_weights
from safetensors_bytes import container

N, K = 5, 40
CODES, SCALES = bytes(range(N * K // 2)) * 2, bytes([120, 127] * N)
FLOATS = torch.linspace(-3, 3, N * K).numpy().tobytes()
WORDS = (
    *quoted("__metadata__", "dtype", "shape", "data_offsets", "weight", *DTYPE_BITS),
    *quoted("l.weight", "l.bias", "l.weight_scale"),
    *(b"[5,40]", b"[0,800]", b"9223372036854775808", b"{}"),
)
CONFIG_WORDS = (
    *quoted("quantization_config", "quant_method", "quant_algo", "modelopt", "MXFP8", "MIXED_PRECISION"),
    *quoted(
        "compressed-tensors", "format", "mxfp8-quantized", "config_groups", "targets", "weights", "Linear"
    ),
    *quoted("fp8", "scale_fmt", "ue8m0", "weight_block_size", "modules_to_not_convert", "exclude_modules"),
    *quoted("quantization", "quantized_layers", "group_size", "weight_map", "model_type", "gpt2", "re:.*"),
    *quoted("ignore"),
)
FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "model.safetensors")
BETWEEN = b"\n--\n"


def body(data: bytes) -> None:
    """The first byte chooses a layer with a bias or without one."""
    spec = LayerSpec("l", N, K, bias=bool(data[:1] and data[0] & 1))
    try:
        weights = read_weights(memoryview(bytearray(data[1:])), spec)
    except CheckpointError:
        return
    assert (weights.weight.n, weights.weight.k) == (N, K)


def file(suffix: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        path = folder() / f"model{suffix}"
        path.write_bytes(data)
        read_all(path)

    return run


def files(data: bytes) -> None:
    """A folder of what is between the marks; an empty piece is a file that is not there."""
    place = folder() / "model"
    place.mkdir(exist_ok=True)
    for name, piece in zip(FILES, [*data.split(BETWEEN, 3), b"", b"", b""], strict=False):
        (place / name).unlink(missing_ok=True)
        if piece:
            (place / name).write_bytes(piece)
    read_all(place)


def read_all(path: Path) -> None:
    """What is opened is described whole, and read or refused layer by layer."""
    for allow_unquantized in (False, True):
        try:
            checkpoint = open_checkpoint(path, allow_unquantized=allow_unquantized)
        except CheckpointError as error:
            str(error).encode()
            continue
        for name in checkpoint.names():
            n, k, bias = checkpoint.spec(name)
            assert checkpoint.nbytes(name) >= 0
            try:
                layer = checkpoint.read(name)
            except CheckpointError:
                continue
            assert (layer.weight.n, layer.weight.k, layer.weight.bias is not None) == (n, k, bias)


@cache
def folder() -> Path:
    """Gone with this process, or with the one that gave it."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    made = in_memory()
    atexit.register(made.cleanup)
    return Path(made.name)


def _safetensors(**entries: tuple[str, Any, bytes]) -> bytes:
    return container({name.replace("__", "."): entry for name, entry in entries.items()})


def _npz(compression: int) -> bytes:
    config = np.array(json.dumps({"vocab_size": 4, "d_model": 33}))
    arrays = {
        "__config__": config,
        "E": np.ones((4, 33), np.float16),
        "w": np.ones((33, 2), np.float32),
        "g": np.ones(33, np.float16),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, array in arrays.items():
            stored = io.BytesIO()
            np.save(stored, array)
            # A fixed date, so that the seed is the same each time.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), stored.getvalue(), compression)
    return buffer.getvalue()


def _folders() -> dict[str, bytes]:
    quantized = _safetensors(l__weight=("F8_E4M3", (N, K), CODES), l__weight_scale=("U8", (N, 2), SCALES))
    blocks = _safetensors(
        l__weight=("F8_E4M3", (N, K), CODES), l__scale=("F32", (1, 2), np.ones(2, "<f4").tobytes())
    )
    methods: dict[str, Any] = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head*"]},
        "compressed": {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "ignore": ["re:.*head"],
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
        },
    }
    found = {
        name: BETWEEN.join([json.dumps({"quantization_config": method}).encode(), b"", b"", quantized])
        for name, method in methods.items()
    }
    fp8 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 32]}
    found["blocks"] = BETWEEN.join([json.dumps({"quantization_config": fp8}).encode(), b"", b"", blocks])
    mixed = {
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"l": {"quant_algo": "MXFP8"}}}
    }
    found["mixed"] = BETWEEN.join([b"{}", json.dumps(mixed).encode(), b"", quantized])
    index = json.dumps({"weight_map": {"l.weight": "model.safetensors"}}).encode()
    found["index"] = BETWEEN.join([b'{"model_type":"gpt2"}', b"", index, b""])
    return found


_BODIES = {
    "float": b"\0" + container({"weight": ("F32", (N, K), FLOATS)}),
    "bias": b"\1" + container({"weight": ("F32", (N, K), FLOATS), "bias": ("F32", (N,), bytes(4 * N))}),
    "mxfp8": b"\0"
    + container({"weight": ("F8_E4M3", (N, K), CODES), "weight_scale": ("F8_E8M0", (N, 2), SCALES)}),
}
_SINGLE = {
    "float": _safetensors(l__weight=("F32", (N, K), FLOATS), l__bias=("BF16", (N,), bytes(2 * N))),
    "mxfp8": _safetensors(l__weight=("F8_E4M3", (N, K), CODES), l__weight_scale=("U8", (N, 2), SCALES)),
}
CHECKPOINTS = (
    Target("weights_body", body, _BODIES, words=WORDS),
    Target("safetensors", file(".safetensors"), _SINGLE, words=WORDS),
    Target("folder", files, _folders(), words=(*WORDS, *CONFIG_WORDS, BETWEEN)),
    # Deflate shortens to a thousandth at best, and an array is held as it is stored and transposed.
    Target(
        "npz",
        file(".npz"),
        {"stored": _npz(zipfile.ZIP_STORED), "deflated": _npz(zipfile.ZIP_DEFLATED)},
        memory=4000,
        words=(
            b"PK\x01\x02",
            b"PK\x03\x04",
            b"PK\x05\x06",
            b"\x93NUMPY\x01\x00",
            b"'descr'",
            b"'<f2'",
            b"'|O'",
        ),
    ),
)
