"""Files of captured rows: what is read of them, and every way in which one does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.accuracy.calibration import Calibration
from gemmwire_service.errors import CheckpointError

SIZES = {"up": 64, "down": 96}


def calibration(folder: Path, tensors: dict[str, Tensor]) -> Calibration:
    save_file(tensors, folder / "x.safetensors")
    return Calibration(folder / "x.safetensors", SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_those_of_the_file_in_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.arange(5 * 64).view(5, 64).to(dtype)
    found = calibration(tmp_path, {"up": x, "down": torch.ones(2, 96)}).rows("up", 10)
    assert found is not None
    assert found.x.dtype == dtype
    assert torch.equal(found.x, x)


def test_more_rows_than_asked_for_are_thinned_evenly(tmp_path: Path) -> None:
    """Guards: the first rows of a long run for all of it."""
    x = torch.arange(100.0)[:, None].expand(100, 64).contiguous()
    found = calibration(tmp_path, {"up": x}).rows("up", 4)
    assert found is not None
    assert found.x[:, 0].tolist() == list(found.numbers) == [0, 33, 66, 99]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    """A file of one layer, and of one that the checkpoint has not: neither is passed over in silence."""
    made = calibration(tmp_path, {"up": torch.ones(1, 64), "lm_head": torch.ones(1, 64)})
    assert made.rows("down", 4) is None
    assert len(made.notes) == 2
    assert "'lm_head'" in made.notes[0]
    assert "'down'" in made.notes[1]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        pytest.param({"up": torch.ones(4, 63)}, "K=64, so [rows, 64] is needed", id="another-k"),
        pytest.param({"up": torch.ones(64)}, "[rows, 64] is needed", id="one-row-without-its-dimension"),
        pytest.param({"up": torch.ones(2, 2, 64)}, "[rows, 64] is needed", id="3-d"),
        pytest.param({"up": torch.ones(0, 64)}, "has no rows", id="no-rows"),
        pytest.param(
            {"up": torch.ones(4, 64, dtype=torch.float64)}, "rows of x are BF16, F16, F32", id="f64"
        ),
        pytest.param({"up": torch.ones(4, 64, dtype=torch.int32)}, "rows of x are BF16, F16, F32", id="int"),
        pytest.param({"model.up": torch.ones(4, 64)}, "have to be named as the layers are", id="other-names"),
        pytest.param({}, "it has nothing", id="empty"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_anything_is_measured(
    tmp_path: Path, tensors: dict[str, Tensor], said: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        calibration(tmp_path, tensors)
    assert said in str(refused.value)
    assert "x.safetensors" in str(refused.value)
    assert "gemmwire.nn.capture" in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_a_row_that_is_not_finite_as_it_is_served_is_refused_by_its_place(
    tmp_path: Path, value: float
) -> None:
    """3.4e38 is finite in FP32 and Inf in BF16, as which it reaches the quantizer."""
    x = torch.ones(5, 64)
    x[4, 17] = value
    made = calibration(tmp_path, {"up": x})
    for limit in (2, 10):
        with pytest.raises(CheckpointError, match=r"'up'.*\[4, 17\].*as which x is served"):
            made.rows("up", limit)


def test_no_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Calibration(tmp_path / "nowhere.safetensors", SIZES)
