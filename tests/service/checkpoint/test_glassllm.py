"""The npz of glassllm: its layers the right way round, and every npz that is not one."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemmwire_service.checkpoint.glassllm import GlassllmCheckpoint, installed_weights
from gemmwire_service.errors import CheckpointError
from gemmwire_service.mxfp8.weight import MxWeight
from oracle import spread

CONFIG = {"vocab_size": 40, "d_model": 33}

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("glassllm") is None,
    reason="glassllm is not installed: pip install 'gemmwire[demo]'",
)


def array(n: int, k: int, dtype: Any = np.float16) -> np.ndarray[Any, np.dtype[Any]]:
    return (spread(n, k) / 2.0**6).numpy().astype(dtype)  # within FP16's range


def model(**changes: Any) -> dict[str, Any]:
    """A small model in glassllm's layout; None removes an array."""
    arrays = {
        "__config__": np.array(json.dumps(CONFIG)),
        "E": array(40, 33),
        "blocks.0.norm1.gamma": np.ones(33, np.float16),
        "blocks.0.ffn.W1": array(33, 20),
    }
    return {name: value for name, value in (arrays | changes).items() if value is not None}


def write(path: Path, **changes: Any) -> Path:
    np.savez(path, **model(**changes))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.npz"


def test_weights_are_stored_k_by_n(path: Path) -> None:
    """Guards: a square weight served transposed, which no shape would show."""
    checkpoint = GlassllmCheckpoint(write(path, **{"blocks.0.attn.W_Q": array(33, 33)}))
    stored = torch.from_numpy(model()["blocks.0.ffn.W1"])

    layer = checkpoint.read("blocks.0.ffn.W1")
    assert checkpoint.names() == ("lm_head", "blocks.0.ffn.W1", "blocks.0.attn.W_Q")
    assert checkpoint.spec("blocks.0.ffn.W1") == (20, 33, False)
    expected = MxWeight.from_float(stored.T.contiguous())
    assert torch.equal(layer.weight.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(layer.weight.scales, expected.scales)
    assert layer.probe is not None
    square = checkpoint.read("blocks.0.attn.W_Q")
    assert square.probe is not None
    expected_y = square.probe.x.double() @ torch.from_numpy(array(33, 33)).double()
    assert torch.allclose(square.probe.y.double(), expected_y, rtol=1e-5, atol=1e-3)


def test_the_tied_embedding_is_served_as_the_output_layer(path: Path) -> None:
    checkpoint = GlassllmCheckpoint(write(path))
    layer, stored = checkpoint.read("lm_head"), torch.from_numpy(model()["E"])

    assert checkpoint.spec("lm_head") == (40, 33, False)
    assert layer.source_dtype == "F16"
    assert torch.equal(layer.weight.scales, MxWeight.from_float(stored).scales)
    assert len(checkpoint.notes) == 1
    assert "E float16 [40, 33]: the embedding, tied to the output, served as lm_head" in checkpoint.notes[0]


def test_what_is_not_a_layer_is_listed(path: Path) -> None:
    """Guards: an array that disappears without a word."""
    extra = {
        "ids": np.zeros((2, 2), np.int64),
        "big": array(2, 2, ">f2"),
        "none": np.zeros((0, 2), np.float16),
    }
    skipped = {each.name: each.reason for each in GlassllmCheckpoint(write(path, **extra)).skipped}
    assert skipped == {
        "__config__": "is the configuration, a JSON string",
        "blocks.0.norm1.gamma": "is 1-D (a vector, as of a norm); a linear layer's weight is 2-D",
        "ids": "is <i8; float16 or float32 in this machine's byte order is read",
        "big": "is >f2; float16 or float32 in this machine's byte order is read",
        "none": "has no elements: float16 [0, 2]",
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "deflated"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_way_numpy_stores_an_array_is_read(save: Callable[..., None], order: Any, path: Path) -> None:
    """Guards: a Fortran-ordered array taken for a transposed one."""
    weight = np.asarray(array(33, 20, np.float32), order=order)
    save(path, **model(W=weight))

    layer = GlassllmCheckpoint(path).read("W")
    expected = MxWeight.from_float(torch.from_numpy(array(33, 20, np.float32)).T.contiguous())
    assert layer.source_dtype == "F32"
    assert torch.equal(layer.weight.codes.view(torch.uint8), expected.codes.view(torch.uint8))


def test_a_value_that_is_not_finite_is_refused(path: Path) -> None:
    weight = array(33, 20)
    weight[2, 5] = np.nan
    with pytest.raises(CheckpointError, match=r"array 'W': holds nan at \[2, 5\]"):
        GlassllmCheckpoint(write(path, W=weight)).read("W")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"E": None}, "lacks E; an npz is read only as written by glassllm", id="no-e"),
        pytest.param({"E": None, "__config__": None}, "lacks __config__ and E", id="another-npz"),
        pytest.param({"lm_head": array(40, 33)}, "has lm_head beside the tied E", id="two-heads"),
        pytest.param(
            {"E": array(33, 40)}, "E' is [33, 40]; __config__ has vocab_size, d_model (40, 33)", id="e-shape"
        ),
        pytest.param({"__config__": np.array("{")}, "__config__: not valid JSON", id="config-not-json"),
        pytest.param({"__config__": np.array(7)}, "__config__: JSON int where an object", id="config-number"),
        pytest.param({"__config__": np.array("{}")}, "vocab_size, d_model (None, None)", id="config-empty"),
        pytest.param(
            {"W": np.array([[{}]])}, "array 'W.npy' holds pickled objects, which are never", id="objects"
        ),
        pytest.param(
            {"__config__": np.array({})}, "holds pickled objects, which are never read", id="config-object"
        ),
        pytest.param({"a/b": array(2, 2)}, "layer name 'a/b' cannot be one segment of a URL", id="slash"),
    ],
)
def test_an_npz_of_another_kind_is_refused(changes: dict[str, Any], says: str, path: Path) -> None:
    """Guards: arrays of some other program served as layers; a pickle that is run."""
    write(path, **changes)
    with pytest.raises(CheckpointError) as error:
        GlassllmCheckpoint(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


DAMAGE: dict[str, bytes] = {
    "no-magic": b"not an array",
    "empty": b"",
    "version-9": b"\x93NUMPY\x09\x00" + bytes(64),
    "cut-header": npy(b"{'descr': '<f2'")[:-3],
    "header-not-a-literal": npy(b"__import__('os').abort()\n"),
    "negative-shape": npy(b"{'descr': '<f2', 'fortran_order': False, 'shape': (-1, -1)}\n", b"\0\0"),
    "too-few-bytes": npy(b"{'descr': '<f2', 'fortran_order': False, 'shape': (2, 2)}\n", b"\0\0"),
    "too-many-bytes": npy(b"{'descr': '<f2', 'fortran_order': False, 'shape': (1, 1)}\n", bytes(4)),
    "shape-wraps": npy(b"{'descr': '<f2', 'fortran_order': False, 'shape': (4294967296, 4294967296)}\n"),
    "no-such-dtype": npy(b"{'descr': '<q9', 'fortran_order': False, 'shape': (1, 1)}\n", bytes(4)),
}


@pytest.mark.parametrize("member", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_array_is_refused(member: bytes, path: Path) -> None:
    """Guards: an allocation of the size that a header claims; an exception of numpy's in its place."""
    write(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("W.npy", member)
    with pytest.raises(CheckpointError, match=r"model\.npz: not a readable npz: "):
        GlassllmCheckpoint(path)


def test_an_array_that_is_there_twice_is_refused(path: Path) -> None:
    write(path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("E.npy", b"")
    with pytest.raises(CheckpointError, match="array 'E' is there twice"):
        GlassllmCheckpoint(path)


def test_every_truncation_is_refused(path: Path) -> None:
    """Guards: an exception of zipfile's. The directory of a zip is at its end."""
    whole = write(path).read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="not a readable npz"):
            GlassllmCheckpoint(path)


def test_bytes_that_changed_since_they_were_written_are_refused(path: Path) -> None:
    """Guards: a weight with a flipped bit: the zip's checksum is looked at."""
    weight = array(33, 500)  # more than is read along with an array's header
    whole = bytearray(write(path, W=weight).read_bytes())
    whole[whole.index(weight.tobytes()) + weight.nbytes - 1] ^= 1
    path.write_bytes(whole)

    checkpoint = GlassllmCheckpoint(path)
    with pytest.raises(CheckpointError, match="Bad CRC-32"):
        checkpoint.read("W")


def test_a_file_that_was_replaced_is_refused(path: Path) -> None:
    checkpoint = GlassllmCheckpoint(write(path))
    write(path, **{"blocks.0.ffn.W1": array(20, 33)})
    with pytest.raises(
        CheckpointError, match=r"array 'blocks\.0\.ffn\.W1': changed since the file was opened"
    ):
        checkpoint.read("blocks.0.ffn.W1")


def test_a_pipe_is_refused(path: Path) -> None:
    """Guards: a load that waits for ever for somebody to write."""
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        GlassllmCheckpoint(path)


def test_another_packing_is_refused(path: Path) -> None:
    """Guards: an array of gigabytes out of a few bytes, which deflate cannot make and others can."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("E.npy", b"x")
    with pytest.raises(CheckpointError, match="is packed by method 14 of zip"):
        GlassllmCheckpoint(path)


def test_a_directory_that_states_more_than_is_there_is_refused(path: Path) -> None:
    """Guards: memory taken for what the file cannot hold."""
    blob = write(path).read_bytes()
    at = blob.rindex(b"E.npy") - 46 + 24  # the size in the directory's entry
    path.write_bytes(blob[:at] + (1 << 31).to_bytes(4, "little") + blob[at + 4 :])
    with pytest.raises(CheckpointError, match="cannot be the 2147483648 that the directory states"):
        GlassllmCheckpoint(path)


def test_a_missing_file_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.npz: no such file"):
        GlassllmCheckpoint(path)


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a ModuleNotFoundError where one command would help."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'gemmwire\[demo\]'"):
        GlassllmCheckpoint(Path("glassllm"))


def test_a_folder_of_the_same_name_is_not_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards: a namespace package that Python makes of any folder called glassllm."""
    (tmp_path / "glassllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "glassllm", raising=False)
    with pytest.raises(CheckpointError, match="not installed"):
        installed_weights()


@needs_package
@pytest.mark.parametrize("name", ["glassllm", "glassllm:en", "glassllm:pt"])
def test_the_installed_package_has_these_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the embedded demo; and the code of the package, which is not to be run for its weights."""
    monkeypatch.delitem(sys.modules, "glassllm", raising=False)
    checkpoint = GlassllmCheckpoint(Path(name))

    assert len(checkpoint.names()) == 1 + 4 * 7
    assert checkpoint.spec("lm_head") == (1024, 128, False)
    assert checkpoint.spec("blocks.0.attn.W_K") == (64, 128, False)
    assert checkpoint.spec("blocks.3.ffn.W2") == (128, 341, False)
    for layer in map(checkpoint.read, checkpoint.names()):
        assert (layer.weight.n, layer.weight.k, False) == checkpoint.spec(layer.name)
    assert "glassllm" not in sys.modules


@needs_package
def test_the_languages_differ() -> None:
    english, portuguese = (
        GlassllmCheckpoint(Path(f"glassllm:{name}")).read("lm_head") for name in ("en", "pt")
    )
    assert not torch.equal(english.weight.codes.view(torch.uint8), portuguese.weight.codes.view(torch.uint8))


@needs_package
@pytest.mark.parametrize("name", ["glassllm:fr", "glassllm:../en", "glassllm:en.npz"])
def test_an_unknown_language_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(CheckpointError, match="the installed package has en, pt"):
        GlassllmCheckpoint(Path(name))
