"""The weight of the TensorRT-LLM kernel, byte by byte."""

from __future__ import annotations

import pytest
import torch

from gemmwire_service.backends.flashinfer_trtllm import FlashinferTrtllm
from gemmwire_service.mxfp8.layout import unshuffle_rows, unshuffle_scales
from gemmwire_service.mxfp8.weight import MxWeight
from kernels import CPU
from oracle import spread

N, K = 130, 341


@pytest.fixture
def weight() -> MxWeight:
    return MxWeight.from_float(spread(N, K), torch.arange(1.0, N + 1))


def test_every_byte_of_the_weight_is_where_the_kernel_reads_it(weight: MxWeight) -> None:
    """Guards: rows that lose their scales on the way. Row s of each 32 goes to 8*(s%4) + s//4."""
    prepared = FlashinferTrtllm().prepare(weight, CPU)
    codes, scales = weight.codes.view(torch.uint8), weight.scales
    rows = prepared.codes.view(torch.uint8)
    blocks = prepared.k_pad // 32
    for row in (0, 1, 5, 31, 32, 77, 128, 129):
        place = row // 32 * 32 + 8 * (row % 4) + row % 32 // 4
        assert torch.equal(rows[place, : weight.k_pad], codes[row])
        assert not rows[place, weight.k_pad :].any()
        for block in range(scales.shape[1]):
            tile = row // 128 * 128 * blocks + block // 4 * 512
            byte = tile + place % 32 * 16 + place % 128 // 32 * 4 + block % 4
            assert prepared.scales[byte] == scales[row, block], f"row {row}, block {block}"


def test_what_pads_the_weight_is_zero(weight: MxWeight) -> None:
    """Guards: memory as it was, in rows that the shuffle puts between the real ones."""
    prepared = FlashinferTrtllm().prepare(weight, CPU)
    assert (prepared.n_pad, prepared.k_pad) == (256, 512)
    codes = unshuffle_rows(prepared.codes).view(torch.uint8)
    scales = unshuffle_scales(prepared.scales, 256, 16)
    assert not codes[N:].any()
    assert not codes[:, weight.k_pad :].any()
    assert not scales[N:].any()
    assert not scales[:, weight.k_pad // 32 :].any()
    assert prepared.bias is not None
    assert prepared.bias.tolist() == [*range(1, N + 1), *[0] * 126]


def test_every_scale_byte_of_a_checkpoint_is_kept() -> None:
    """Guards: scales that are computed anew, or clamped; byte 0 and 254 are scales too."""
    codes = torch.full((255, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    prepared = FlashinferTrtllm().prepare(MxWeight.from_mxfp8(codes, scales), CPU)
    assert unshuffle_scales(prepared.scales, 256, 8)[:255, 0].tolist() == list(range(255))


def test_scales_beyond_the_weight_are_left_behind(weight: MxWeight) -> None:
    """Guards: a checkpoint whose scales come padded to whole tiles."""
    padded = torch.nn.functional.pad(weight.scales, (0, 5, 0, 126), value=200)
    wide = FlashinferTrtllm().prepare(MxWeight(weight.codes, padded, None, weight.k), CPU)
    assert torch.equal(wide.scales, FlashinferTrtllm().prepare(weight, CPU).scales)
