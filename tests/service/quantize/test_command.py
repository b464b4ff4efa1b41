"""gemmwire-serve quantize, from a folder to a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemmwire_service.__main__ import main
from gemmwire_service.checkpoint import open_checkpoint
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.quantize.declaration import DECLARATIONS, declare
from oracle import spread

FIXTURES = Path(__file__).parents[2] / "fixtures" / "checkpoints"
BF16 = FIXTURES / "bf16"


def run(*arguments: object) -> int:
    return main(["quantize", *map(str, arguments)])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(got) == sorted(expected)
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(raw(got[name]), raw(tensor)), name


def config_of(folder: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def model(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


def floats(count: int = 2, n: int = 64, k: int = 96) -> dict[str, Tensor]:
    return {f"layers.{i}.up.weight": spread(n, k, seed=i).bfloat16() for i in range(count)}


def assert_nothing_left(folder: Path) -> None:
    """No folder, and no part of one beside it."""
    assert [entry.name for entry in folder.parent.iterdir() if folder.name in entry.name] == []


def test_the_result_is_the_checkpoint_that_modelopt_writes(tmp_path: Path) -> None:
    """Guards: a name, dtype, shape or byte of which vLLM would make something else, or nothing."""
    assert run(BF16, tmp_path / "made") == 0
    theirs, ours = FIXTURES / "modelopt", tmp_path / "made"
    assert_same(tensors_of(ours), tensors_of(theirs))

    for name, place in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        expected, got = config_of(theirs, name)[place], config_of(ours, name)[place]
        for lists in ("ignore", "exclude_modules"):  # theirs name the embedding too, which is no layer
            if lists in expected:
                assert got.pop(lists) == [each for each in expected.pop(lists) if "embed" not in each]
        assert got.pop("producer", {}).get("name") == expected.pop("producer", {}).get("name")
        assert got == expected


def test_the_declaration_is_the_one_that_compressed_tensors_writes(tmp_path: Path) -> None:
    assert run(BF16, tmp_path / "made", "--format", "compressed-tensors") == 0
    expected = config_of(FIXTURES / "compressed-tensors")["quantization_config"]
    assert config_of(tmp_path / "made")["quantization_config"] == expected
    assert sorted(tensors_of(tmp_path / "made")) == sorted(tensors_of(FIXTURES / "compressed-tensors"))
    assert not (tmp_path / "made" / "hf_quant_config.json").exists()


@pytest.mark.parametrize("form", DECLARATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shard", [1, 9000, 10**9])
def test_it_is_loaded_back_bit_for_bit(form: str, dtype: torch.dtype, shard: int, tmp_path: Path) -> None:
    weights = {name: each.clamp(-6e4, 6e4).to(dtype) for name, each in floats(3).items()}
    biases = {name.replace("weight", "bias"): spread(1, 64, seed=9)[0].to(dtype) for name in weights}
    source = model(tmp_path / "source", {**weights, **biases})
    assert run(source, tmp_path / "made", "--format", form, "--shard", shard) == 0

    made, original = open_checkpoint(tmp_path / "made"), open_checkpoint(source)
    assert made.names() == original.names()
    for layer in made.names():
        got, expected = made.read(layer).weight, original.read(layer).weight
        assert torch.equal(raw(got.codes), raw(expected.codes))
        assert torch.equal(got.scales, expected.scales)
        assert got.bias is not None
        assert expected.bias is not None
        assert torch.equal(got.bias, expected.bias)
    files = sorted(file.name for file in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) == {1: 6, 9000: 3, 10**9: 1}[shard]


def test_what_is_no_layer_is_copied_unchanged(tmp_path: Path) -> None:
    """Guards: a tensor of a dtype that no layer has lost or converted; alignment of what follows a byte."""
    others = {
        "norm.weight": torch.arange(5.0),
        "flag": torch.tensor([True]),
        "ids": torch.arange(7),
        "double.weight": torch.ones(2, 2, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "embed_tokens.weight": spread(8, 64),
        "experts.gate_up": spread(2, 64).view(2, 2, 32),
        "u8": torch.arange(3, dtype=torch.uint8),
    }
    source = model(tmp_path / "source", {**floats(1), **others}, architectures=["X"], rope=float("inf"))
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".hidden").write_text("")
    (source / "original").mkdir()
    (source / "original" / "consolidated.pth").write_bytes(b"pickle")
    (source / "original" / "params.json").write_text("{}")
    (source / "empty").mkdir()
    (source / "assets" / "deeper").mkdir(parents=True)
    (source / "assets" / "chat.jinja").write_text("hello")
    assert run(source, tmp_path / "made") == 0

    got = tensors_of(tmp_path / "made")
    assert_same({name: got[name] for name in others}, others)
    assert sorted(str(entry.relative_to(tmp_path / "made")) for entry in (tmp_path / "made").rglob("*")) == [
        "assets",
        "assets/chat.jinja",
        "config.json",
        "hf_quant_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = config_of(tmp_path / "made")
    assert (config["architectures"], config["rope"], config["model_type"]) == (["X"], float("inf"), "llama")
    assert config["quantization_config"]["ignore"] == ["lm_head", "experts"]
    with safe_open(tmp_path / "made" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_modules_of_sentence_transformers_are_copied_with_their_weights(tmp_path: Path) -> None:
    """Guards: an embedding model that loads and lacks its last layer."""
    source = model(tmp_path / "source", floats(1))
    (source / "modules.json").write_text('[{"path": ""}, {"path": "1_Dense"}]')
    for name in ("1_Dense", "other"):
        (source / name).mkdir()
        save_file({"linear.weight": torch.ones(2, 2)}, source / name / "model.safetensors")
    assert run(source, tmp_path / "made") == 0
    assert (tmp_path / "made" / "1_Dense" / "model.safetensors").is_file()
    assert not (tmp_path / "made" / "other").exists()


def test_shards_have_the_index_that_transformers_looks_for(tmp_path: Path) -> None:
    assert run(model(tmp_path / "source", floats(2)), tmp_path / "made", "--shard", 1) == 0
    index = config_of(tmp_path / "made", "model.safetensors.index.json")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index["weight_map"] == {
        "layers.0.up.weight": first,
        "layers.0.up.weight_scale": first,
        "layers.1.up.weight": second,
        "layers.1.up.weight_scale": second,
    }
    assert index["metadata"]["total_size"] == 2 * (64 * 96 + 64 * 3)


@pytest.mark.parametrize("name", ["modelopt", "compressed-tensors", "vendor", "fp8-blocks-128", "deepseek"])
def test_a_quantized_checkpoint_is_brought_into_another_format(name: str, tmp_path: Path) -> None:
    """Guards: numbers quantized twice; scales kept under the name or the block of the old format."""
    assert run(FIXTURES / name, tmp_path / "made", "--format", "compressed-tensors") == 0
    made, original = open_checkpoint(tmp_path / "made"), open_checkpoint(FIXTURES / name)
    assert sorted(made.names()) == sorted(original.names())
    for layer in made.names():
        got, expected = made.read(layer).weight, original.read(layer).weight
        assert torch.equal(raw(got.codes), raw(expected.codes))
        assert torch.equal(got.scales, expected.scales)
    assert sorted(tensors_of(tmp_path / "made")) == sorted(tensors_of(FIXTURES / "modelopt"))


def test_a_layer_that_is_quantized_already_stays_so_whatever_the_patterns(tmp_path: Path) -> None:
    """Guards: E4M3 codes copied without their scales, in a list of what is not quantized."""
    head = MxWeight.from_float(spread(8, 64))
    source = model(
        tmp_path / "source",
        {"lm_head.weight": head.codes, "lm_head.weight_scale_inv": head.scales, **floats(1)},
        quantization_config={"quant_method": "mxfp8"},
    )
    assert run(source, tmp_path / "made") == 0
    assert config_of(tmp_path / "made")["quantization_config"]["ignore"] == []
    assert torch.equal(tensors_of(tmp_path / "made")["lm_head.weight_scale"], head.scales)


def test_what_stays_unquantized_is_declared_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: an engine that looks for the scales of a layer that has none."""
    weights = floats(2) | {
        "lm_head.weight": spread(8, 64).bfloat16(),
        "layers.0.mlp.gate.weight": spread(8, 64).bfloat16(),
        "layers.0.odd.weight": spread(8, 40).bfloat16(),
    }
    assert run(model(tmp_path / "source", weights), tmp_path / "made", "--exclude", "layers.1.*") == 0
    excluded = config_of(tmp_path / "made")["quantization_config"]["ignore"]
    assert sorted(excluded) == ["layers.0.mlp.gate", "layers.0.odd", "layers.1.up", "lm_head"]
    assert open_checkpoint(tmp_path / "made").names() == ("layers.0.up",)
    assert "layers.0.odd has K=40, not a multiple of 32" in capsys.readouterr().err

    assert run(tmp_path / "source", tmp_path / "all", "--no-default-excludes") == 0
    assert config_of(tmp_path / "all")["quantization_config"]["ignore"] == ["layers.0.odd"]


@pytest.mark.parametrize(
    ("tensors", "config", "says"),
    [
        pytest.param({"norm.weight": torch.ones(4)}, {}, "no linear layer to serve", id="no-layer"),
        pytest.param({"m.weight": torch.ones(4, 40)}, {}, "no layer to quantize: m has K=40", id="ragged"),
        pytest.param({"lm_head.weight": torch.ones(4, 64)}, {}, "excluded by 'lm_head'", id="excluded"),
        pytest.param({"c_fc.weight": torch.ones(64, 64)}, {"model_type": "gpt2"}, "[in, out]", id="conv1d"),
        pytest.param(
            {"m.weight": torch.ones(4, 64), "q.weight": torch.ones(4, 64).to(torch.float8_e5m2)},
            {},
            "tensor 'q.weight' is F8_E5M2 [4, 64], of another quantization",
            id="other-quantization",
        ),
        pytest.param(
            {"m.weight": torch.ones(4, 64)}, {"quantization_config": {"bits": 4}}, "declares the", id="gptq"
        ),
        pytest.param({"m.weight": torch.full((4, 64), torch.nan)}, {}, "holds nan at [0, 0]", id="nan"),
    ],
)
def test_what_cannot_be_quantized_leaves_nothing(
    tensors: dict[str, Tensor], config: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model(tmp_path / "source", tensors, **config), tmp_path / "made") == 2
    assert says in capsys.readouterr().err
    assert_nothing_left(tmp_path / "made")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "source", floats())


def test_a_folder_that_is_there_is_replaced_by_force_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = model(tmp_path / "made", {"old": torch.ones(1)})
    assert run(source, made) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert list(tensors_of(made)) == ["old"]

    assert run(source, made, "--force") == 0
    assert "old" not in tensors_of(made)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["", "force"])
def test_a_folder_that_is_no_checkpoint_is_never_replaced(
    force: tuple[str, ...], source: Path, tmp_path: Path
) -> None:
    """Guards: --force and a slip of the finger, and a home folder is gone."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "thesis.txt").write_text("years of work")
    assert run(source, tmp_path / "made", *force) == 2
    assert (tmp_path / "made" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", [".", "..", "link"])
def test_the_source_is_never_replaced(name: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "config.json").touch()
    assert run(source, source / name if name != "link" else tmp_path / "link", "--force") == 2
    assert list(tensors_of(source)) == list(floats())


def test_two_that_write_at_once_do_not_replace_each_other(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a model replaced without --force, because it was not there when the work began."""
    made = tmp_path / "made"

    def slow(*arguments: Any) -> None:
        declare(*arguments)
        model(made, {"other": torch.ones(1)})

    monkeypatch.setattr("gemmwire_service.quantize.command.declare", slow)
    assert run(source, made) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert list(tensors_of(made)) == ["other"]


def test_the_current_folder_and_a_link_can_be_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    assert run(source, ".") == 0
    assert run(source, tmp_path / "link") == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["here", "link", "source", "there"]
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert not (tmp_path / "link").is_symlink()
    assert list((tmp_path / "there").iterdir()) == []


def test_an_empty_folder_is_filled(source: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    assert run(source, tmp_path / "made") == 0
    assert open_checkpoint(tmp_path / "made").names() == ("layers.0.up", "layers.1.up")


@pytest.mark.parametrize("there", [False, True])
def test_a_disk_that_fills_up_leaves_what_was_there(there: bool, source: Path, tmp_path: Path) -> None:
    """Guards: half a model under the name of a whole one. The kernel refuses bytes after the first 8192."""
    made = tmp_path / "made"
    if there:
        model(made, {"old": torch.ones(1)})
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)); "
        "from gemmwire_service.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "quantize", str(source), str(made), "--force"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, "writing failed" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    if there:
        assert list(tensors_of(made)) == ["old"]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["made", "source"]
    else:
        assert_nothing_left(made)


def test_too_small_a_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda place: Full)
    assert run(source, tmp_path / "made") == 2
    assert "and 1000 are free there" in capsys.readouterr().err
    assert_nothing_left(tmp_path / "made")


def test_a_mount_point_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: hours of work for a folder that cannot take the place of a volume."""
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "made")
    monkeypatch.setattr("gemmwire_service.quantize.command.replacing", None)
    assert run(source, tmp_path / "made") == 2
    assert "made: is a mount point, whose place nothing can take" in capsys.readouterr().err


@pytest.mark.parametrize("step", ["made", ".made.partial-"])
def test_a_rename_that_fails_puts_back_what_was_there(
    step: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(tmp_path / "made", {"old": torch.ones(1)})
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(step) and self.parent == tmp_path:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    assert run(source, made, "--force") == 2
    assert list(tensors_of(made)) == ["old"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["made", "source"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    source = model(tmp_path / "source", floats(200))
    with subprocess.Popen(
        [sys.executable, "-m", "gemmwire_service", "quantize", str(source), str(tmp_path / "made")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stderr is not None
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".made.partial-*/*.safetensors")) and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(100) == 130
    assert "Traceback" not in rest
    assert_nothing_left(tmp_path / "made")


def test_the_result_can_be_read_by_others(source: Path, tmp_path: Path) -> None:
    """Guards: the permissions of a temporary folder on a model that a server of another user loads."""
    mask = os.umask(0o022)
    try:
        assert run(source, tmp_path / "made") == 0
    finally:
        os.umask(mask)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "made").iterdir()} == {0o644}


@pytest.mark.parametrize(
    "arguments",
    [[], ["a"], ["a", "b", "--format", "gguf"], ["a", "b", "--shard", "0"], ["a", "b", "--shard", "x"]],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)


def test_a_file_is_no_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BF16 / "model-00001-of-00003.safetensors", tmp_path / "made") == 2
    assert "is no folder; name the folder of the model" in capsys.readouterr().err


def test_equal_weights_make_equal_folders(source: Path, tmp_path: Path) -> None:
    """Guards: bytes of the result that depend on the day: a checkpoint is compared by its hash."""
    assert run(source, tmp_path / "a") == 0
    time.sleep(0.01)
    assert run(source, tmp_path / "b") == 0
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    first = next(iter(floats().values()))
    assert torch.equal(
        raw(open_checkpoint(tmp_path / "a").read("layers.0.up").weight.codes),
        raw(MxWeight.from_float(first).codes),
    )
