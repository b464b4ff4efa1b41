"""Flag over GEMMWIRE_* variable over default; what is not known is refused."""

from __future__ import annotations

import pytest

from gemmwire_service.errors import SettingsError
from gemmwire_service.settings import ModelSource, RandomLayer, Settings, load, parser


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("GEMMWIRE_")]:
        monkeypatch.delenv(name)


def test_a_flag_wins_over_a_variable_and_that_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load([]).port == 8000
    monkeypatch.setenv("GEMMWIRE_PORT", "8001")
    assert load([]).port == 8001
    assert load(["--port", "8002"]).port == 8002


def test_every_setting_has_a_flag_with_a_description() -> None:
    help_text = parser().format_help()
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in help_text
        assert field.description, name


def test_nothing_named_serves_the_demo() -> None:
    assert load([]).sources() == (ModelSource("demo", "glassllm"),)
    assert load(["--random-layer", "r=4x8"]).sources() == ()


def test_models_are_repeated_as_flags_and_comma_separated_as_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = (ModelSource("a", "/m/a"), ModelSource("", "/m/b"))
    assert load(["--model", "a=/m/a", "--model", "/m/b"]).sources() == expected
    monkeypatch.setenv("GEMMWIRE_MODEL", "a=/m/a,/m/b")
    assert load([]).sources() == expected


def test_random_layers() -> None:
    assert load(["--random-layer", "r=1024x4096"]).random_layers() == (RandomLayer("r", 1024, 4096),)


@pytest.mark.parametrize(
    "text", ["r", "r=4", "r=0x8", "r=4x", "=4x8", "a/b=4x8", "r=4x8x2", "r=-4x8", "r=999999999x999999999"]
)
def test_a_random_layer_that_is_not_name_n_k(text: str) -> None:
    with pytest.raises(SettingsError, match=r"NAME=NxK|at most"):
        load([f"--random-layer={text}"]).random_layers()


@pytest.mark.parametrize("text", ["a/b=path", "=path", "a=", ""])
def test_a_model_name_that_would_not_survive_in_a_url(text: str) -> None:
    with pytest.raises(SettingsError, match="NAME=PATH"):
        load([f"--model={text}"]).sources()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "x"),
        ("--port", "70000"),
        ("--max-queue", "0"),
        ("--device", "tpu"),
        ("--log-level", "loud"),
    ],
)
def test_a_wrong_value_names_flag_variable_and_value(flag: str, value: str) -> None:
    with pytest.raises(SettingsError, match=flag) as raised:
        load([flag, value])
    assert value in str(raised.value)
    assert "GEMMWIRE_" in str(raised.value)


def test_an_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMWIRE_PROT", "1")
    with pytest.raises(SettingsError, match="GEMMWIRE_PORT"):
        load([])


@pytest.mark.parametrize("arguments", [["--prot", "1"], ["--por", "1"], ["serve"]], ids=" ".join)
def test_an_unknown_or_abbreviated_flag_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        load(arguments)
    assert raised.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modle", "x"], "there is no option --modle; did you mean --model?"),
        (["--max-queu=3"], "there is no option --max-queu=3; did you mean --max-queue?"),
        (["--zzz"], "there is no option --zzz; --help lists them"),
        (["--port", "1", "folder"], "'folder' belongs to no option; a checkpoint is --model folder"),
    ],
)
def test_an_unknown_word_is_answered_with_what_was_meant(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a screen of usage in which the one wrong letter has to be found."""
    with pytest.raises(SystemExit):
        load(arguments)
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 2


def test_a_reason_of_ours_stands_without_the_library_s_words() -> None:
    with pytest.raises(SettingsError, match="is 'tpu': it must be auto"):
        load(["--device", "tpu"])


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load([]).port = 1


def test_references_go_with_their_model() -> None:
    given = ["--model", "a=/m/a", "--model", "/m/b", "--reference", "a=/f/a", "--reference", "/f/b"]
    assert load(given).references() == {"a": "/f/a", "": "/f/b"}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["b=/f"], "'b': no --model of that name; one for each of ['a']"),
        (["/f"], "'': no --model"),
        (["a=/f", "a=/g"], "'a': named twice"),
        (["a/b=/f"], "--reference is 'a/b=/f'; it must be NAME=PATH or PATH"),
    ],
)
def test_a_reference_that_belongs_to_no_model_is_refused(texts: list[str], says: str) -> None:
    """Guards: a check that was asked for and is left out without a word."""
    with pytest.raises(SettingsError) as error:
        load(["--model", "a=/m/a", *(f"--reference={text}" for text in texts)]).references()
    assert says in str(error.value)
