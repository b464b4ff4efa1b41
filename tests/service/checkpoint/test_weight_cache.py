"""Layers that were quantized once, and when they are taken for the ones that are asked for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemmwire_service.checkpoint import LayerWeights, open_checkpoint, weight_cache
from gemmwire_service.checkpoint.safetensors import SafetensorsCheckpoint
from gemmwire_service.checkpoint.weight_cache import CachedCheckpoint
from gemmwire_service.errors import CheckpointError
from oracle import spread

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def saved(folder: Path, tensors: dict[str, Tensor] | None = None, config: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    made = {"a.weight": spread(7, 40), "a.bias": spread(1, 7)[0], "b.weight": spread(3, 64).bfloat16()}
    save_file(made if tensors is None else tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(config)
    return folder


def opened(folder: Path, cache: Path) -> CachedCheckpoint:
    return CachedCheckpoint(SafetensorsCheckpoint(folder), cache)


def read(checkpoint: CachedCheckpoint) -> dict[str, LayerWeights]:
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def assert_same(got: LayerWeights, expected: LayerWeights) -> None:
    def raw(tensor: Tensor | None) -> list[int]:
        return [] if tensor is None else tensor.contiguous().view(-1).view(torch.uint8).tolist()

    assert (got.name, got.source_dtype) == (expected.name, expected.source_dtype)
    assert (got.weight.n, got.weight.k) == (expected.weight.n, expected.weight.k)
    for part in ("codes", "scales", "bias"):
        assert raw(getattr(got.weight, part)) == raw(getattr(expected.weight, part)), part
    assert got.fidelity == expected.fidelity
    assert got.probe is not None
    assert expected.probe is not None
    assert (got.probe.x.dtype, got.probe.y.dtype) == (expected.probe.x.dtype, expected.probe.y.dtype)
    assert (raw(got.probe.x), raw(got.probe.y)) == (raw(expected.probe.x), raw(expected.probe.y))


def test_what_is_kept_is_what_was_quantized(tmp_path: Path, cache: Path) -> None:
    """Guards: a probe, bias or ragged K lost on the way through the cache."""
    source = saved(tmp_path / "m")
    first, second = opened(source, cache), opened(source, cache)
    expected = {name: SafetensorsCheckpoint(source).read(name) for name in first.names()}
    for checkpoint, hits in ((first, 0), (second, 2)):
        for name, layer in read(checkpoint).items():
            assert_same(layer, expected[name])
        assert checkpoint.hits == hits


def test_a_second_start_reads_no_weight(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a cache that saves the quantizer and not the reading and hashing of the model."""
    source = saved(tmp_path / "m")
    read(opened(source, cache))
    second = opened(source, cache)

    def never(*arguments: object) -> None:
        pytest.fail("the source was read")

    for file in second._checkpoint.files.values():
        monkeypatch.setattr(file, "load", never)
        monkeypatch.setattr(file, "chunks", never)
    assert (len(read(second)), second.hits) == (2, 2)


def test_the_same_content_elsewhere_is_known(tmp_path: Path, cache: Path) -> None:
    source = saved(tmp_path / "m")
    read(opened(source, cache))
    shutil.copytree(source, tmp_path / "copy")
    again = opened(tmp_path / "copy", cache)
    read(again)
    assert again.hits == 2


def test_other_content_under_the_same_name_is_not_taken(tmp_path: Path, cache: Path) -> None:
    """Guards: the weights of last week, served because the file has the name and the size that it had."""
    tensors = {"a.weight": spread(4, 64)}
    source = saved(tmp_path / "m", tensors)
    before = os.stat(source / "model.safetensors")
    read(opened(source, cache))

    tensors["a.weight"][1, 5] += 1000
    saved(source, tensors)
    os.utime(source / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    again = opened(source, cache)
    assert_same(again.read("a"), SafetensorsCheckpoint(source).read("a"))
    assert again.hits == 0


@pytest.mark.parametrize("change", ["bias", "dtype", "name", "shape", "transposed", "version", "format"])
def test_everything_that_the_result_depends_on_is_in_the_key(
    change: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = torch.ones(64, 64), torch.zeros(64)
    read(opened(saved(tmp_path / "before", {"c_fc.weight": weight, "c_fc.bias": bias}), cache))
    tensors = {"c_fc.weight": weight, "c_fc.bias": bias}
    if change == "bias":
        tensors["c_fc.bias"] = bias + 1
    elif change == "dtype":
        tensors["c_fc.weight"] = weight.bfloat16()
    elif change == "name":
        tensors = {"other.weight": weight, "other.bias": bias}
    elif change == "shape":
        tensors["c_fc.weight"] = weight.reshape(64, 64)[:, :32].contiguous()
    elif change == "version":
        monkeypatch.setattr(weight_cache, "__version__", "next")
    elif change == "format":
        monkeypatch.setattr(weight_cache, "FORMAT", weight_cache.FORMAT + 1)
    config = '{"model_type": "gpt2"}' if change == "transposed" else ""
    after = opened(saved(tmp_path / "after", tensors, config), cache)
    read(after)
    assert after.hits == 0


@pytest.mark.parametrize("damage", ["truncated", "empty", "nan", "other", "folder", "no-figures", "figures"])
def test_a_damaged_entry_is_made_again(
    damage: str, tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: a cache that has to be found and deleted by hand before the server starts again."""
    source = saved(tmp_path / "m", {"a.weight": spread(4, 64)})
    read(opened(source, cache))
    (entry,) = (cache / "weights").iterdir()
    content = bytearray(entry.read_bytes())
    if damage == "nan":
        tensors = {"codes": torch.full((4, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)}
        save_file({**tensors, "scales": torch.zeros(4, 2, dtype=torch.uint8)}, entry)
    elif damage == "other":
        save_file({"x": torch.ones(1)}, entry)
    elif damage in ("no-figures", "figures"):
        save_file(load_file(entry), entry, {"fidelity": "[]"} if damage == "figures" else None)
    elif damage == "folder":
        entry.unlink()
        entry.mkdir()
    else:
        entry.write_bytes(content[:-7] if damage == "truncated" else b"")

    again = opened(source, cache)
    assert_same(again.read("a"), SafetensorsCheckpoint(source).read("a"))
    assert (again.hits, "cannot be used and is made again" in caplog.text) == (0, True)
    if damage != "folder":
        third = opened(source, cache)
        third.read("a")
        assert third.hits == 1


@pytest.mark.parametrize("note", ["", "short", "\udcff", "0" * 64])
def test_a_damaged_note_is_looked_through(note: str, tmp_path: Path, cache: Path) -> None:
    """A note of the right form is believed; it leads to an entry of that content or to none."""
    source = saved(tmp_path / "m", {"a.weight": spread(4, 64)})
    read(opened(source, cache))
    (place,) = (cache / "seen").iterdir()
    place.write_bytes(note.encode("utf-8", "surrogateescape"))
    again = opened(source, cache)
    assert_same(again.read("a"), SafetensorsCheckpoint(source).read("a"))
    assert again.hits == (0 if note == "0" * 64 else 1)


def test_a_folder_that_cannot_be_written_is_done_without(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder would be")
    source = saved(tmp_path / "m")
    checkpoint = opened(source, cache)
    assert (len(read(checkpoint)), checkpoint.hits) == (2, 0)
    assert "cannot be written" in caplog.text


def test_a_write_that_fails_leaves_no_part(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    checkpoint = opened(saved(tmp_path / "m"), cache)
    assert len(read(checkpoint)) == 2
    assert list((cache / "weights").iterdir()) == []
    assert "No space left on device" in caplog.text


def test_what_a_killed_process_left_is_removed_once_it_is_old(tmp_path: Path, cache: Path) -> None:
    """Guards: parts as large as a layer, one more for each process that is killed."""
    source = saved(tmp_path / "m")
    read(opened(source, cache))
    old, new = (cache / "weights" / f".{name}.safetensors.0123abcd" for name in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"part")
    os.utime(old, (1, 1))
    opened(source, cache)
    assert (old.exists(), new.exists()) == (False, True)


def test_quantized_layers_are_read_from_where_they_are(cache: Path) -> None:
    checkpoint = opened(FIXTURES / "modelopt", cache)
    assert {layer.source_dtype for layer in read(checkpoint).values()} == {"MXFP8"}
    assert not cache.exists()


def test_a_weight_that_is_refused_is_refused_each_time(tmp_path: Path, cache: Path) -> None:
    source = saved(tmp_path / "m", {"a.weight": torch.full((2, 32), torch.inf)})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="holds inf at"):
            opened(source, cache).read("a")
    with pytest.raises(CheckpointError, match="no layer 'b'"):
        opened(source, cache).read("b")


def test_the_folder_is_its_owners_alone(tmp_path: Path, cache: Path) -> None:
    """Guards: weights that another user of the machine exchanges."""
    read(opened(saved(tmp_path / "m"), cache))
    assert {(cache / name).stat().st_mode & 0o777 for name in ("weights", "seen")} == {0o700}


@pytest.mark.parametrize("name", ["weights", "seen"])
@pytest.mark.parametrize("how", ["mode", "link", "owner"])
def test_a_folder_that_others_can_write_to_is_not_used(
    how: str,
    name: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards: weights that somebody else put there, for content whose hash anyone can compute."""
    source = saved(tmp_path / "m")
    read(opened(source, cache))
    if how == "mode":
        (cache / name).chmod(0o777)
    elif how == "link":
        (cache / name).rename(tmp_path / "elsewhere")
        (cache / name).symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr("os.geteuid", lambda: (cache / name).stat().st_uid + 1)
    again = opened(source, cache)
    assert (len(read(again)), again.hits) == (2, 0)
    assert "is not used: others can write to it" in caplog.text


def test_it_says_of_a_checkpoint_what_the_checkpoint_says(tmp_path: Path, cache: Path) -> None:
    source = saved(tmp_path / "m")
    plain, cached = open_checkpoint(source), opened(source, cache)
    for layer in plain.names():
        assert (cached.spec(layer), cached.nbytes(layer)) == (plain.spec(layer), plain.nbytes(layer))
    assert (cached.format, cached.names(), cached.skipped, cached.notes) == (
        plain.format,
        plain.names(),
        plain.skipped,
        plain.notes,
    )
