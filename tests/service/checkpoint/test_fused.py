"""Checkpoints whose layers are fused when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gemmwire_service.checkpoint import Checkpoint, open_checkpoint
from gemmwire_service.checkpoint.fused import FusedCheckpoint
from gemmwire_service.errors import CheckpointError
from gemmwire_service.fusing import KNOWN, Rule
from gemmwire_service.mxfp8.fidelity import Fidelity
from oracle import spread

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
GATE_UP = KNOWN["gate_up"]


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def pair(n: int = 3, k: int = 40, k_up: int = 40) -> dict[str, Tensor]:
    return {"m.gate_proj.weight": spread(n, k, seed=1), "m.up_proj.weight": spread(5, k_up, seed=2)}


@pytest.mark.parametrize("name", [path.name for path in sorted(FIXTURES.iterdir())])
def test_the_bytes_are_those_of_the_parts_in_order(name: str) -> None:
    """Guards: parts that are concatenated after padding, or in the order of the file."""
    apart = open_checkpoint(FIXTURES / name)
    fused = FusedCheckpoint(apart, KNOWN["qkv"] + GATE_UP)
    layers = [layer for layer in fused.names() if fused.parts(layer)]
    assert {layer.rpartition(".")[2] for layer in layers} == {"qkv_proj", "gate_up_proj"}
    for layer in layers:
        got = fused.read(layer)
        module = layer.rpartition(".")[0]
        parts = [apart.read(f"{module}.{part}") for part, _ in fused.parts(layer)]
        assert [part.weight.n for part in parts] == [n for _, n in fused.parts(layer)]
        stored = torch.cat([part.weight.codes.view(torch.uint8) for part in parts])
        assert torch.equal(got.weight.codes.view(torch.uint8), stored)
        assert torch.equal(got.weight.scales, torch.cat([part.weight.scales for part in parts]))
        assert (got.weight.n, got.weight.k) == fused.spec(layer)[:2]
        assert fused.nbytes(layer) == sum(apart.nbytes(part.name) for part in parts)
    kept = [layer for layer in fused.names() if layer not in layers]
    assert set(kept) < set(apart.names())
    assert fused.read(kept[0]).name == kept[0]


def test_the_probe_knows_of_each_part_what_its_own_rows_give(tmp_path: Path) -> None:
    apart = checkpoint(tmp_path, pair())
    probe = FusedCheckpoint(apart, GATE_UP).read("m.gate_up_proj").probe
    gate, up = (apart.read(f"m.{name}").probe for name in ("gate_proj", "up_proj"))
    assert probe is not None
    assert gate is not None
    assert up is not None
    assert torch.equal(probe.x, torch.cat([gate.x, up.x]))
    assert torch.equal(probe.y[:4, :3], gate.y)
    assert torch.equal(probe.y[4:, 3:], up.y)
    assert probe.y.isnan().sum() == 4 * 5 + 4 * 3


def test_the_figures_of_a_fused_weight_are_those_of_its_parts_together(tmp_path: Path) -> None:
    apart = checkpoint(tmp_path, pair())
    fused = FusedCheckpoint(apart, GATE_UP)
    parts = [apart.read(f"m.{name}").fidelity for name in ("gate_proj", "up_proj")]
    found = fused.read("m.gate_up_proj").fidelity
    assert found is not None
    assert found == Fidelity.total([part for part in parts if part is not None])
    assert found.rows == 8
    assert fused.has_unquantized("m.gate_up_proj")
    weights = [apart.unquantized(f"m.{name}") for name in ("gate_proj", "up_proj")]
    assert torch.equal(fused.unquantized("m.gate_up_proj"), torch.cat(weights))


def test_a_fused_layer_takes_the_place_of_its_first_part(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": spread(2, 32) for name in ("a", "gate_proj", "b", "up_proj", "c")}
    apart = checkpoint(tmp_path, tensors)
    expected = [name for name in apart.names() if name != "up_proj"]
    expected[expected.index("gate_proj")] = "gate_up_proj"
    assert list(FusedCheckpoint(apart, GATE_UP).names()) == expected


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (pair(k_up=41), "K differs: 40, 41"),
        (pair() | {"m.up_proj.bias": torch.ones(5)}, "only up_proj has a bias"),
        (pair() | {"m.gate_up_proj.weight": torch.ones(2, 2)}, "there is a layer m.gate_up_proj already"),
    ],
    ids=["k", "bias", "name"],
)
def test_what_cannot_be_fused_stays_apart_and_is_listed(
    tensors: dict[str, Tensor], why: str, tmp_path: Path
) -> None:
    apart = checkpoint(tmp_path, tensors)
    fused = FusedCheckpoint(apart, GATE_UP)
    assert fused.names() == apart.names()
    assert fused.notes[-1] == f"1 are not fused: m.gate_up_proj=gate_proj+up_proj: {why}"


def test_an_incomplete_group_and_a_rule_without_use_are_said(tmp_path: Path) -> None:
    apart = checkpoint(tmp_path, pair())
    rule = Rule("three", ("gate_proj", "up_proj", "side_proj"))
    assert FusedCheckpoint(apart, (rule,)).notes[-1].endswith("there is no m.side_proj")
    unused = FusedCheckpoint(apart, KNOWN["qkv"][:1])
    assert unused.notes[-1] == "no layers are fused by qkv_proj=q_proj+k_proj+v_proj"


def test_a_part_cannot_be_read_by_its_own_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no layer 'm\.up_proj'"):
        FusedCheckpoint(checkpoint(tmp_path, pair()), GATE_UP).read("m.up_proj")
