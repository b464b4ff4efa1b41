"""infer over a real socket: every form of the protocol gives the same numbers."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
import torch
from torch import Tensor

from http_calls import HEADER_LENGTH, TORCH, call, infer, json_message, message, raw
from oracle import assert_rows_close, reference, spread
from serving import Served, serving, settings

DTYPES = list(TORCH)
LAYERS = ["plain", "ragged", "one", "wide"]


def expected(weights: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
    return reference(x, weights[f"{layer}.weight"], weights.get(f"{layer}.bias"))


def rows(weights: dict[str, Tensor], layer: str, m: int, seed: int = 1) -> Tensor:
    return spread(m, weights[f"{layer}.weight"].shape[1], seed=seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", [1, 7, 129])
def test_binary_answers_are_the_dequantized_product(
    server: Served, weights: dict[str, Tensor], layer: str, m: int, dtype: str
) -> None:
    x = rows(weights, layer, m).to(TORCH[dtype])
    body, length = message(x, id="seven")
    reply = infer(server, f"m.{layer}", body, length)
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer["model_name"] == f"m.{layer}"
    assert answer["model_version"] == "1"
    assert answer["id"] == "seven"
    assert answer["parameters"]["backend"] == "emulation"
    assert answer["parameters"]["bucket"] >= m
    assert answer["outputs"][0]["datatype"] == dtype
    y = expected(weights, layer, x)
    # FP16 holds less range than the answer may need: compare where it does not overflow.
    fits = (y.abs().amax(-1) < 60000) if dtype == "FP16" else torch.ones(m, dtype=torch.bool)
    assert fits.any()
    assert_rows_close(reply.tensor[fits], y[fits])


@pytest.mark.parametrize("dtype", DTYPES)
def test_json_numbers_give_the_bits_of_binary(server: Served, weights: dict[str, Tensor], dtype: str) -> None:
    x = (rows(weights, "ragged", 5) / 64).to(TORCH[dtype])
    binary = infer(server, "m.ragged", *message(x)).tensor
    answer = infer(server, "m.ragged", json_message(x))
    assert HEADER_LENGTH.lower() not in answer.headers
    output = answer.json["outputs"][0]
    assert (output["name"], output["datatype"], output["shape"]) == ("y", dtype, [5, 130])
    as_json = torch.tensor(output["data"], dtype=torch.float64).to(TORCH[dtype]).view(5, 130)
    assert torch.equal(as_json, binary)


def test_nested_json_data_equals_flat(server: Served, weights: dict[str, Tensor]) -> None:
    x = rows(weights, "plain", 4)
    flat = json.loads(json_message(x))
    nested = json.loads(json_message(x))
    nested["inputs"][0]["data"] = x.tolist()
    first, second = (infer(server, "m.plain", json.dumps(form).encode()) for form in (flat, nested))
    assert first.json["outputs"] == second.json["outputs"]


def test_binary_in_json_out_and_json_in_binary_out(server: Served, weights: dict[str, Tensor]) -> None:
    x = rows(weights, "plain", 3)
    straight = infer(server, "m.plain", *message(x)).tensor
    body, length = message(x, outputs=[{"name": "y", "parameters": {"binary_data": False}}])
    mixed = infer(server, "m.plain", body, length)
    assert HEADER_LENGTH.lower() not in mixed.headers
    assert torch.equal(torch.tensor(mixed.json["outputs"][0]["data"]).view(3, 64), straight)
    other = infer(
        server, "m.plain", json_message(x, outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    )
    assert torch.equal(other.tensor, straight)


def test_without_outputs_or_a_flag_the_answer_is_json(server: Served, weights: dict[str, Tensor]) -> None:
    body, length = message(rows(weights, "plain", 1), parameters={})
    assert infer(server, "m.plain", body, length).json["outputs"][0]["data"]


def test_the_raw_binary_request_has_no_json_at_all(server: Served, weights: dict[str, Tensor]) -> None:
    x = rows(weights, "ragged", 6).to(torch.bfloat16)
    reply = infer(server, "m.ragged", raw(x), 0)
    assert reply.json["outputs"][0]["shape"] == [6, 130]
    assert torch.equal(reply.tensor, infer(server, "m.ragged", *message(x)).tensor)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 2)], ids=str)
def test_leading_dimensions_are_kept(
    server: Served, weights: dict[str, Tensor], lead: tuple[int, ...]
) -> None:
    x = rows(weights, "plain", 12)[: max(1, torch.Size(lead).numel())].reshape(*lead, 128)
    y = infer(server, "m.plain", *message(x)).tensor
    assert y.shape == (*lead, 64)
    assert_rows_close(y.reshape(-1, 64), expected(weights, "plain", x.reshape(-1, 128)))


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows_are_answered_on_every_route(server: Served, lead: tuple[int, ...]) -> None:
    x = torch.empty(*lead, 128)
    executions = server.engine.layers["m.plain"].stats.executions
    assert infer(server, "m.plain", *message(x)).tensor.shape == (*lead, 64)
    answer = infer(server, "m.plain", json_message(x)).json["outputs"][0]
    assert (answer["shape"], answer["data"]) == ([*lead, 64], [])
    assert infer(server, "m.plain", b"", 0).tensor.shape == (0, 64)
    assert server.engine.layers["m.plain"].stats.executions == executions


@pytest.mark.parametrize("asked", DTYPES)
def test_another_output_datatype_is_the_same_value(
    server: Served, weights: dict[str, Tensor], asked: str
) -> None:
    x = (rows(weights, "wide", 4) / 4096).to(torch.bfloat16)
    straight = infer(server, "m.wide", *message(x)).tensor
    parameters = {"binary_data": True, "datatype": asked}
    y = infer(server, "m.wide", *message(x, outputs=[{"name": "y", "parameters": parameters}])).tensor
    assert y.dtype is TORCH[asked]
    assert torch.equal(y, straight.to(TORCH[asked]))


def test_an_answer_beyond_fp16_is_an_infinity_of_its_sign(server: Served, weights: dict[str, Tensor]) -> None:
    """Guards: a saturated or wrapped number, or a refusal, where the answer's own datatype is too narrow."""
    x = torch.ldexp(rows(weights, "plain", 24), torch.arange(-12, 12).view(24, 1))

    def answer(datatype: str) -> Tensor:
        outputs = [{"name": "y", "parameters": {"binary_data": True, "datatype": datatype}}]
        return infer(server, "m.plain", *message(x, outputs=outputs)).tensor

    wide, narrow = answer("FP32"), answer("FP16")
    beyond = wide.abs() >= 65520
    assert beyond.any()
    assert not beyond.all()
    assert torch.equal(narrow[beyond], wide[beyond].sign().half() * float("inf"))
    assert torch.equal(narrow[~beyond], wide[~beyond].half())


def test_a_row_has_one_answer_in_a_bucket_and_a_close_one_in_others(
    server: Served, weights: dict[str, Tensor]
) -> None:
    """Guards: bits that depend on M within a bucket, which nobody could compare two runs by."""
    x = rows(weights, "wide", 8, seed=4)
    seven, eight = (infer(server, "m.wide", *message(x[:m])) for m in (7, 8))
    assert {reply.json["parameters"]["bucket"] for reply in (seven, eight)} == {8}
    assert torch.equal(seven.tensor, eight.tensor[:7])
    alone = infer(server, "m.wide", *message(x[:1]))
    assert alone.json["parameters"]["bucket"] == 1
    assert_rows_close(alone.tensor, eight.tensor[:1].double())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_is_nan_and_alone(
    server: Served, weights: dict[str, Tensor], value: float, dtype: str
) -> None:
    x = (rows(weights, "ragged", 3) / 64).to(TORCH[dtype])
    clean = infer(server, "m.ragged", *message(x)).tensor
    x[1, 32] = value
    y = infer(server, "m.ragged", *message(x)).tensor
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    as_json = infer(server, "m.ragged", json_message(x)).json["outputs"][0]["data"]
    assert as_json[130:260] == ["NaN"] * 130
    assert not any(isinstance(number, str) for number in as_json[:130])


def test_rows_beyond_the_largest_bucket_are_chunked(checkpoint: object, weights: dict[str, Tensor]) -> None:
    with serving(settings(model=(f"m={checkpoint}",), max_bucket=8)) as small:
        x = rows(weights, "ragged", 29)
        reply = infer(small, "m.ragged", *message(x))
        assert reply.json["parameters"]["bucket"] == 8
        assert_rows_close(reply.tensor, expected(weights, "ragged", x))
        # A chunk is a forward of its own: the first 8 rows have the bits of 8 rows sent alone.
        assert torch.equal(reply.tensor[:8], infer(small, "m.ragged", *message(x[:8])).tensor)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies(server: Served, weights: dict[str, Tensor], encoding: str) -> None:
    body, length = message(rows(weights, "plain", 2))
    packed = gzip.compress(body) if encoding == "gzip" else zlib.compress(body)
    reply = infer(server, "m.plain", packed, length, Content_Encoding=encoding)
    assert torch.equal(reply.tensor, infer(server, "m.plain", body, length).tensor)


def test_a_chunked_body_is_read_to_its_end(server: Served, weights: dict[str, Tensor]) -> None:
    body, length = message(rows(weights, "plain", 2))
    pieces = (body[at : at + 100] for at in range(0, len(body), 100))
    reply = call(server, "POST", "/v2/models/m.plain/infer", pieces, {HEADER_LENGTH: str(length)})
    assert torch.equal(reply.tensor, infer(server, "m.plain", body, length).tensor)


def test_a_version_in_the_path_must_be_the_served_one(server: Served, weights: dict[str, Tensor]) -> None:
    body, length = message(rows(weights, "plain", 1))
    headers = {HEADER_LENGTH: str(length)}
    path = "/v2/models/m.plain/versions/{}/infer"
    assert call(server, "POST", path.format(1), body, headers).status == 200
    refused = call(server, "POST", path.format(2), body, headers)
    assert (refused.status, refused.json["code"], refused.json["expected"]) == (404, "version_unknown", "1")


def test_the_request_id_comes_back_only_where_it_is_harmless(server: Served) -> None:
    good = infer(server, "nowhere", b"{}", x_request_id="abc-1")
    assert (good.headers["x-request-id"], good.json["request_id"]) == ("abc-1", "abc-1")
    bad = infer(server, "nowhere", b"{}", x_request_id="<script>")
    assert "x-request-id" not in bad.headers
    assert bad.json["request_id"] == ""


def test_bits_do_not_depend_on_what_came_before(server: Served, weights: dict[str, Tensor]) -> None:
    x = rows(weights, "wide", 3)
    first = infer(server, "m.wide", *message(x)).tensor
    poison = rows(weights, "wide", 4, seed=9)
    poison[3] = float("nan")
    infer(server, "m.wide", *message(poison))
    assert torch.equal(infer(server, "m.wide", *message(x)).tensor, first)
