"""Rows of x of a model's linear layers: which, how many, of which dtype; and the model is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gemmwire import InvalidArgument
from gemmwire.nn import capture

K = 8


def numbered(first: int, count: int, k: int = K) -> Tensor:
    """Rows first, first + 1, ...: each of its own number throughout."""
    return torch.arange(first, first + count).float()[:, None].expand(count, k).contiguous()


def numbers(rows: Tensor) -> list[int]:
    """Of whole rows alone."""
    assert (rows == rows[:, :1]).all(), "a row is of two rows of x"
    return [int(each) for each in rows[:, 0]]


class Twice(nn.Module):
    """One linear at two places, and another with the weight of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(K, K)
        self.again = self.first
        self.tied = nn.Linear(K, K)
        self.tied.weight = self.first.weight
        self.idle = nn.Linear(K, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(self.again(self.first(x)))
        return y


def hooks_of(model: nn.Module) -> list[Any]:
    return [hook for each in model.modules() for hook in (*each._forward_hooks, *each._forward_pre_hooks)]


@pytest.fixture
def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(K, K))


# --- which rows ---


def test_all_rows_are_kept_while_there_is_room(linear: nn.Sequential) -> None:
    with capture(linear, 10) as captured:
        linear(numbered(0, 4))
        linear(numbered(4, 6))
    assert numbers(captured.rows["0"]) == list(range(10))
    assert captured.seen == {"0": 10}


def test_leading_dimensions_are_rows(linear: nn.Sequential) -> None:
    with capture(linear, 100) as captured:
        linear(numbered(0, 24).view(2, 3, 4, K))
        linear(numbered(24, 1)[0])
        linear[0](input=numbered(25, 1))
    assert numbers(captured.rows["0"]) == list(range(26))


def test_no_rows_are_no_rows(linear: nn.Sequential) -> None:
    with capture(linear, 4) as captured:
        linear(torch.zeros(0, K))
        linear(numbered(0, 3))
    assert numbers(captured.rows["0"]) == [0, 1, 2]


def test_more_rows_are_a_uniform_sample_over_all_calls(linear: nn.Sequential) -> None:
    """Guards: the first n, which of a long run are its beginning, and a sample in which some place or some
    call counts more. Of 200 rows in calls of 7, 20 are kept 300 times: each row 30 times, give or take
    5.2."""
    counts = torch.zeros(200)
    for seed in range(300):
        with capture(linear, 20, seed=seed) as captured:
            for first in range(0, 200, 7):
                linear(numbered(first, min(7, 200 - first)))
        kept = numbers(captured.rows["0"])
        assert len(set(kept)) == 20, "a row is there twice"
        counts[kept] += 1
    assert float(counts.sum()) == 300 * 20
    assert (counts - 30).abs().max() < 5 * 5.2
    for part in counts.split(50):
        assert abs(float(part.mean()) - 30) < 5 * 5.2 / 50**0.5


def test_room_is_taken_for_the_rows_that_come(linear: nn.Sequential) -> None:
    """Guards: memory for n rows of every layer at its first call, where n only means "all"."""
    with capture(linear, 10**12) as captured:
        for first in range(0, 35, 5):
            linear(numbered(first, 5))
    assert numbers(captured.rows["0"]) == list(range(35))


def test_what_has_no_numbers_is_not_recorded(linear: nn.Sequential) -> None:
    """Guards: a sample that a trace has spoiled, and a model on the meta device that does not answer."""
    with capture(linear, 4) as captured:
        torch.export.export(linear, (numbered(0, 3),))
        linear(numbered(7, 1))
    assert numbers(captured.rows["0"]) == [7]
    empty = nn.Sequential(nn.Linear(K, K)).to("meta")
    with capture(empty, 4) as captured:
        assert empty(numbered(0, 3).to("meta")).shape == (3, K)
    assert captured.rows == {}


@pytest.mark.parametrize("inner", [False, True])
def test_a_compiled_model_is_refused(linear: nn.Sequential, inner: bool) -> None:
    """Guards: an hour of a model's calls of which nothing was recorded."""
    compiled: Any = torch.compile(linear, backend="eager")
    with pytest.raises(InvalidArgument, match="has been compiled"):
        capture(nn.Sequential(compiled) if inner else compiled)
    with capture(compiled._orig_mod, 4) as captured:
        compiled._orig_mod(numbered(0, 3))
    assert captured.seen == {"0": 3}


def test_one_call_of_many_rows_is_sampled_as_many_calls_are(linear: nn.Sequential) -> None:
    counts = torch.zeros(100)
    for seed in range(200):
        with capture(linear, 10, seed=seed) as captured:
            linear(numbered(0, 100))
        counts[numbers(captured.rows["0"])] += 1
    assert float(counts.sum()) == 2000
    assert (counts - 20).abs().max() < 5 * 4.3


def test_the_same_calls_give_the_same_rows_and_other_generators_stay_as_they_were(
    linear: nn.Sequential,
) -> None:
    """Guards: q, k and v of which each has other tokens, and a training run that draws other numbers."""
    before = torch.get_rng_state()
    found = []
    for seed in (0, 0, 1):
        with capture(linear, 5, seed=seed) as captured:
            linear(numbered(0, 50))
        found.append(numbers(captured.rows["0"]))
    assert found[0] == found[1] != found[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_layer_refuses_is_not_recorded(linear: nn.Sequential) -> None:
    with capture(linear, 4) as captured:
        with pytest.raises(RuntimeError):
            linear(torch.zeros(2, K + 1))
        linear(numbered(0, 2))
    assert numbers(captured.rows["0"]) == [0, 1]


def test_rows_are_copies(linear: nn.Sequential) -> None:
    """Guards: x that is written over by its owner, as buffers of inference engines are."""
    x = numbered(0, 3)
    with capture(linear, 4) as captured:
        linear(x)
    x.fill_(-1)
    assert numbers(captured.rows["0"]) == [0, 1, 2]


# --- of which layers ---


def test_a_module_at_two_places_has_both_names_and_tied_ones_are_their_own() -> None:
    model = Twice()
    with capture(model, 8) as captured, torch.no_grad():
        model(numbered(0, 3))
    assert sorted(captured.rows) == ["again", "first", "tied"]
    assert torch.equal(captured.rows["first"], captured.rows["again"])
    assert captured.seen == {"first": 6, "again": 6, "tied": 3, "idle": 0}
    assert "idle was not called" in str(captured)


def test_names_can_be_those_of_another_checkpoint() -> None:
    model = Twice()
    with capture(model, 2, name=lambda path: f"model.{path}" if path == "tied" else None) as captured:
        model(numbered(0, 2))
    assert list(captured.rows) == ["model.tied"]


def test_another_class_is_recorded_where_it_is_named() -> None:
    class Conv1D(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(Conv1D(), nn.Linear(K, K))
    with capture(model, 2, kinds=(Conv1D,)) as captured:
        model(numbered(0, 2))
    assert list(captured.rows) == ["0"]


# --- a model that is left as it was ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_have_the_dtype_of_x(dtype: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(K, K)).to(dtype).eval()
    with capture(model, 4) as captured:
        model(numbered(0, 3).to(dtype))
    captured.save(tmp_path / "x.safetensors")
    saved = load_file(tmp_path / "x.safetensors")
    assert saved["0"].dtype == dtype
    assert torch.equal(saved["0"], numbered(0, 3).to(dtype))


def test_calls_of_several_dtypes_lose_nothing(linear: nn.Sequential) -> None:
    """Guards: FP32 rows that are rounded because the first were BF16. FP64 becomes FP32."""
    with capture(linear, 9) as captured:
        linear.bfloat16()(numbered(1, 1).bfloat16())
        linear.float()(numbered(2, 1) + 2.0**-20)
        linear.double()(numbered(3, 1).double() + 2.0**-40)
    assert captured.rows["0"].dtype == torch.float32
    assert captured.rows["0"][:, 0].tolist() == [1.0, 2.0 + 2.0**-20, 3.0]


def test_answers_and_gradients_are_those_of_the_model_alone() -> None:
    model = Twice()
    x = torch.randn(5, K, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    expected, alone = x.grad.clone(), model(x)
    x.grad = None
    with capture(model, 4) as captured:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, alone)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert not any(rows.requires_grad for rows in captured.rows.values())


def test_rows_of_inference_mode_and_of_training_go_into_one_sample(linear: nn.Sequential) -> None:
    """Guards: a buffer of inference mode, which nothing outside of it may write to."""
    with capture(linear, 6) as captured:
        with torch.inference_mode():
            linear(numbered(0, 2))
        linear(numbered(2, 2))
        with torch.no_grad():
            linear(numbered(4, 9))
    assert len(set(numbers(captured.rows["0"]))) == 6
    assert captured.seen == {"0": 13}


def test_hooks_go_at_the_end_also_where_that_is_an_exception() -> None:
    model = Twice()
    own = model.first.register_forward_hook(lambda *_: None)
    before = hooks_of(model)
    captured = capture(model, 2)

    def fails() -> None:
        with captured:
            assert len(hooks_of(model)) == len(before) + 3
            model(numbered(0, 2))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert hooks_of(model) == before
    model(numbered(2, 2))
    assert captured.seen["tied"] == 2
    own.remove()


def test_a_block_can_be_opened_again_and_not_twice_at_once(linear: nn.Sequential) -> None:
    captured = capture(linear, 9)
    for first in (0, 2):
        with captured:
            linear(numbered(first, 2))
            with pytest.raises(InvalidArgument, match="records already"), captured:
                pass
    assert numbers(captured.rows["0"]) == [0, 1, 2, 3]
    assert hooks_of(linear) == []


# --- refusals, and the file ---


@pytest.mark.parametrize("n", [0, -1, 2.0, True, None])
def test_a_number_of_rows_that_is_none_is_refused(linear: nn.Sequential, n: Any) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        capture(linear, n)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        pytest.param(nn.Sequential(nn.ReLU()), {}, "no Linear to record", id="none"),
        pytest.param(nn.Linear(K, K), {}, "give it one", id="itself"),
        pytest.param(Twice(), {"name": lambda path: "same"}, "Two modules are named 'same'", id="one-name"),
        pytest.param(Twice(), {"name": lambda path: None}, "no Linear to record", id="none-is-meant"),
    ],
)
def test_a_model_without_a_layer_to_record_is_refused(
    model: nn.Module, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        capture(model, 4, **options)


def test_a_linear_by_itself_can_be_named() -> None:
    model = nn.Linear(K, K)
    with capture(model, 4, name=lambda path: "proj") as captured:
        model(numbered(0, 1))
    assert list(captured.rows) == ["proj"]


def test_nothing_recorded_is_not_saved(linear: nn.Sequential, tmp_path: Path) -> None:
    """Guards: an empty file that is found out later."""
    with capture(linear, 4) as captured:
        pass
    with pytest.raises(InvalidArgument, match="was called"):
        captured.save(tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_there_whole_or_as_it_was(linear: nn.Sequential, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with capture(linear, 4) as captured:
        linear(numbered(0, 2))
    captured.save(path)
    captured.save(str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        captured.save(tmp_path / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "x.safetensors"]


# --- to the report ---


def test_a_real_model_s_rows_reach_its_report(tmp_path: Path) -> None:
    """Guards: names that the checkpoint does not have, and rows that are not what the model computes."""
    pytest.importorskip("glassllm")
    from gemmwire_service.accuracy.calibration import Calibration
    from gemmwire_service.accuracy.inputs import CAPTURED
    from gemmwire_service.accuracy.layer import measure
    from gemmwire_service.accuracy.source import Source
    from glassllm_torch import Glass

    model = Glass().eval()
    ids = torch.tensor([model.tokenizer.encode("Alice was beginning to get very tired of sitting by her")])
    with torch.inference_mode(), capture(model, 32) as captured:
        model(ids)
        model(ids.repeat(3, 1))
    assert len(captured.rows) == 29
    captured.save(tmp_path / "x.safetensors")

    source = Source(Path("glassllm"), None, ())
    calibration = Calibration(
        tmp_path / "x.safetensors", {n: source.checkpoint.spec(n).k for n in source.names}
    )
    assert calibration.notes == ()
    for name in source.names:
        rows = calibration.rows(name, 32)
        assert rows is not None
        assert len(rows.x) == min(32, ids.numel() * 4)
        found = measure(source.read(name), {CAPTURED: rows})
        assert found.judged.verdict == "fine", found.judged.reasons
        assert 0.005 < found.outputs[CAPTURED].relative_error < 0.06


def test_the_model_of_these_tests_is_glassllm_s() -> None:
    """Guards: activations of a model that only looks like it."""
    pytest.importorskip("glassllm")
    from glassllm import load_pretrained

    from glassllm_torch import Glass

    theirs, tokenizer = load_pretrained("en")
    ids = tokenizer.encode("Alice was beginning to get very tired of sitting by her sister on the bank")
    with torch.no_grad():
        logits = Glass().eval()(torch.tensor([ids]))
    expected = torch.from_numpy(theirs.forward(ids).data).float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
