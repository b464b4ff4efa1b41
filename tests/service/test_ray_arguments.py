"""What an application under Ray Serve is told to be, without Ray."""

from __future__ import annotations

import pytest

from gemmwire_service.errors import SettingsError
from gemmwire_service.ray_arguments import NOT_OFFERED, Scaling, read_arguments
from gemmwire_service.settings import Settings
from source_tree import ROOT

FIELDS = Scaling.model_fields


def test_words_of_a_command_line_are_typed() -> None:
    """Guards: `serve run ... min_replicas=2`, where all values are strings."""
    read = read_arguments(
        {
            "model": "a=x,b=y",
            "max_bucket": "64",
            "batch_invariant": "true",
            "min_replicas": "2",
            "num_gpus": "0.5",
        }
    )
    assert [source.name for source in read.settings.sources()] == ["a", "b"]
    assert (read.settings.max_bucket, read.settings.batch_invariant) == (64, True)
    assert (read.scaling.min_replicas, read.scaling.most, read.scaling.num_gpus) == (2, 2, 0.5)


def test_a_config_file_may_list_models() -> None:
    assert len(read_arguments({"model": ["a=x", "b=y"], "max_replicas": 4}).settings.sources()) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param({"modle": "x"}, "There is no argument 'modle'; did you mean model?", id="unknown"),
        pytest.param({"xyzzy": 1}, "no argument 'xyzzy'; the arguments are placement, parts", id="far"),
        pytest.param({"port": "8000"}, "port='8000' is not for .*Ray's proxy has the socket", id="socket"),
        pytest.param({"model_root": "/m"}, "loaded by one replica of many", id="one-replica"),
        pytest.param({"part": "1/2"}, "placement=partition gives each replica its part", id="part"),
        pytest.param({"min_replicas": "two"}, "Argument min_replicas is 'two': ", id="no-number"),
        pytest.param({"max_bucket": "0"}, "Argument max_bucket is '0': ", id="setting"),
        pytest.param({"min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, less than", id="less"),
        pytest.param({"placement": "spread"}, "Argument placement is 'spread'", id="placement"),
        pytest.param({"placement": "partition"}, "a partition has parts=2 or more", id="no-parts"),
        pytest.param({"parts": 4}, "a partition has parts=2 or more", id="parts-of-replicas"),
        pytest.param({"device": "gpu"}, "Argument device is 'gpu'", id="device"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(given: dict[str, object], words: str) -> None:
    """Guards: a typing error that starts a cluster of defaults."""
    with pytest.raises(SettingsError, match=words):
        read_arguments(given)


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(SettingsError) as refused:
        read_arguments({"modle": "x", "port": 1})
    assert len(str(refused.value).splitlines()) == 2


def test_no_name_has_two_meanings() -> None:
    """Guards: a setting of the service that an argument of the scaling takes away."""
    assert not set(Scaling.model_fields) & set(Settings.model_fields)
    assert set(NOT_OFFERED) <= set(Settings.model_fields)


def test_the_page_has_every_argument() -> None:
    """Guards: an argument that nobody finds, and a page that promises another default."""
    page = (ROOT / "docs" / "ray.md").read_text()
    rows = [f"| `{name}` | {shown(field.default)} | {field.description} |" for name, field in FIELDS.items()]
    assert [row for row in rows if row not in page] == []


def shown(default: object) -> str:
    return "" if default is None else f"`{default}`"
