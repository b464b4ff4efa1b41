"""Rows of x of a model on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gemmwire.nn import capture

pytestmark = pytest.mark.gpu


def test_rows_come_to_the_host_as_they_were(device: torch.device, tmp_path: Path) -> None:
    """Guards: a sample that stays on the GPU, and rows that were written over before they were copied."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).to(device, torch.bfloat16).eval()
    x = torch.arange(600, device=device).to(torch.bfloat16)[:, None].expand(600, 64).contiguous()
    with torch.inference_mode(), capture(model, 48) as captured:
        for part in x.split(100):
            kept = part.clone()
            model(kept)
            kept.fill_(-1)
    rows = captured.rows["0"]
    assert rows.device.type == "cpu"
    assert (rows.shape, rows.dtype) == ((48, 64), torch.bfloat16)
    assert (rows == rows[:, :1]).all()
    assert (rows >= 0).all()
    captured.save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size > 48 * 64 * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_records_what_the_layer_was_given(device: torch.device, dtype: torch.dtype) -> None:
    """x of the first linear is the caller's FP32, that of the second what the first answered."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).to(device)
    with torch.autocast(device.type, dtype), capture(model, 4) as captured:
        model(torch.ones(2, 64, device=device))
    assert captured.rows["0"].dtype == torch.float32
    assert captured.rows["1"].dtype == dtype
