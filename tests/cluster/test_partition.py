"""A checkpoint over two parts: whoever asks sees one server that has all of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import exact_layer_versions as exact
from conftest import BIASED, SHAPES
from exact_layer_versions import LAYER, X, expected, weight
from gemmwire import BadRequest, Client, NotFound, TooLarge
from oracle import assert_rows_close, assert_same_bits, reference, spread
from ray_cluster import Deployed, deployed

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def parts(proxy: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("refits")
    with deployed(
        proxy,
        "parts",
        model=[f"m={checkpoint}", exact.checkpoint(tmp_path_factory.mktemp("exact"))],
        placement="partition",
        parts=2,
        refit_dir=str(folder),
        max_body_bytes=1 << 20,
        max_weights_bytes=1 << 20,
    ) as running:
        yield running


def test_every_layer_answers_under_one_url(parts: Deployed, weights: dict[str, Tensor]) -> None:
    """Guards: a request that goes to the part that has not the layer."""
    with Client(parts.url) as client:
        assert sorted(info.name for info in client.layers()) == sorted([*(f"m.{n}" for n in SHAPES), LAYER])
        for name, (_, k) in SHAPES.items():
            x = spread(5, k, seed=3).bfloat16()
            bias = weights[f"{name}.bias"] if name in BIASED else None
            y = client.infer(f"m.{name}", x)
            assert_rows_close(y, reference(x, weights[f"{name}.weight"], bias))
            assert client.layer(f"m.{name}").name == f"m.{name}"
            assert client.stats(f"m.{name}")["name"] == f"m.{name}"
    assert [len(parts.pids(f"part-{index}")) for index in (1, 2)] == [1, 1]


def test_what_concerns_all_layers_is_of_all_parts(parts: Deployed) -> None:
    with Client(parts.url) as client:
        assert client.ready()
        assert client.live()
        assert client.server().name == "gemmwire"
    with urllib.request.urlopen(parts.url + "/v2/models/stats") as reply:
        assert len(json.load(reply)["model_stats"]) == len(SHAPES) + 1


def test_refusals_are_those_of_one_server(parts: Deployed) -> None:
    with Client(parts.url, retries=0) as client:
        with pytest.raises(NotFound, match=r"no layer 'none'; the layers are m\.one, m\.plain, .*lists them"):
            client.infer("none", X)
        with pytest.raises(BadRequest, match=r"takes x\[\.\.\., 128\]"):
            client.infer(LAYER, X[:, :64])
        with pytest.raises(TooLarge):
            client.infer(LAYER, torch.zeros(5000, 128))


@pytest.mark.parametrize("path", ["/metrics", "/", "/status", "/v2/nothing"])
def test_one_part_s_view_of_itself_is_not_given_for_the_whole(parts: Deployed, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(parts.url + path):
        pass
    with refused.value:
        assert refused.value.code == 404
        assert json.load(refused.value)["code"] == "route_unknown"


def test_a_refit_goes_to_the_part_that_has_the_layer(parts: Deployed) -> None:
    with Client(parts.url) as client:
        assert client.refit(LAYER, weight(2)).version == "2"
        answer = client.call(LAYER, X.bfloat16(), min_version=2)
    assert_same_bits(answer.y, expected(2))
