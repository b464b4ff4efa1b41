"""How tensors are divided among files."""

from __future__ import annotations

import pytest

from gemmwire_service.checkpoint.safetensors_writer import NewTensor
from gemmwire_service.quantize.outline import Step
from gemmwire_service.quantize.shards import file_names, split


def step(*sizes: int) -> Step:
    tensors = tuple(NewTensor(f"{i}", "U8", (size,)) for i, size in enumerate(sizes))
    return Step(tensors, None, sum(sizes))


@pytest.mark.parametrize(
    ("sizes", "limit", "files"),
    [
        pytest.param([4, 4, 4], 12, [[4, 4, 4]], id="just-fits"),
        pytest.param([4, 4, 4], 11, [[4, 4], [4]], id="one-too-many"),
        pytest.param([9, 4, 9], 5, [[9], [4], [9]], id="larger-than-a-file"),
        pytest.param([0, 4, 0], 4, [[0, 4, 0]], id="empty-tensors"),
        pytest.param([], 4, [], id="nothing"),
    ],
)
def test_files_are_filled_in_order_up_to_the_limit(
    sizes: list[int], limit: int, files: list[list[int]]
) -> None:
    made = split([step(size) for size in sizes], limit)
    assert [[each.nbytes for each in file] for file in made] == files


def test_a_weight_and_its_scales_are_not_parted() -> None:
    assert [len(file) for file in split([step(4, 4), step(4, 4)], 12)] == [1, 1]


def test_files_are_named_as_transformers_names_them() -> None:
    assert file_names(1) == ["model.safetensors"]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
