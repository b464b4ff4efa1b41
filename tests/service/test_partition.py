"""The layers of one checkpoint over several servers: each in one part, and the parts of about one size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from conftest import SHAPES
from gemmwire_service.errors import SettingsError
from gemmwire_service.partition import partition
from gemmwire_service.settings import load
from serving import serving, settings


@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
def test_each_layer_is_in_one_part_and_parts_are_even(count: int) -> None:
    generator = random.Random(count)
    sizes = {f"l{index}": generator.choice([1, 7, 64, 4096]) * 1024 for index in range(64)}
    parts = partition(sizes, count)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    sums = [sum(sizes[name] for name in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes.values())
    assert all(parts)


def test_the_order_of_a_checkpoint_s_files_changes_nothing() -> None:
    """Guards: two servers that both serve a layer, and none the other."""
    sizes = {f"l{index}": 1 + index % 3 for index in range(20)}
    backwards = dict(reversed(sizes.items()))
    assert partition(sizes, 3) == partition(backwards, 3)


def test_the_parts_of_a_checkpoint_are_all_of_it(checkpoint: Path) -> None:
    served: list[list[str]] = []
    for part in ("1/2", "2/2"):
        options = settings(model=(f"m={checkpoint}",), random_layer=("r=64x64", "s=32x32"), part=part)
        with serving(options) as running:
            served.append(sorted(running.engine.layers))
    assert sorted(served[0] + served[1]) == sorted([*(f"m.{name}" for name in SHAPES), "r", "s"])
    assert served[0]
    assert served[1]


def test_a_model_of_which_a_part_has_nothing_is_no_failure(checkpoint: Path) -> None:
    options = settings(model=(f"m={checkpoint}",), random_layer=("huge=1024x1024",), part="1/2")
    with serving(options) as running:
        assert list(running.engine.layers) == ["huge"]


def test_more_parts_than_layers_are_refused(checkpoint: Path) -> None:
    refused = pytest.raises(SettingsError, match="There are 4 layers, fewer than 5 parts")
    with refused, serving(settings(model=(f"m={checkpoint}",), part="5/5")):
        pass


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--part .*INDEX/COUNT"):
        load([f"--part={text}"], {})


def test_a_part_is_not_of_models_that_come_later(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--part is of layers that are there from the start"):
        load(["--part", "1/2", "--model-root", str(tmp_path)], {})
