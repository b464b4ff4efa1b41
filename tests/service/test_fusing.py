"""--fuse: the rules, and fused layers as a client meets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from safetensors.torch import save_file
from torch import Tensor

import gemmwire
from gemmwire_service.errors import SettingsError
from gemmwire_service.fusing import KNOWN, Rule, read_rules
from http_calls import HEADER_LENGTH, TORCH, Reply, call, infer, json_message, message, raw
from oracle import assert_rows_close, assert_same_bits, reference, rounded_once, sparse, spread
from serving import Served, serving, settings

K = 96
ROWS = {"q_proj": 130, "k_proj": 33, "v_proj": 64}
LAYER = "f.a.qkv_proj"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = {f"a.{name}.weight": sparse(n, K, generator) for name, n in ROWS.items()}
    biases = {f"a.{name}.bias": sparse(1, n, generator)[0] for name, n in ROWS.items()}
    other = {"a.o_proj.weight": spread(16, K, seed=1), "b.gate_proj.weight": spread(40, K, seed=2)}
    return weights | biases | other | {"b.up_proj.weight": spread(70, K, seed=3)}


@pytest.fixture(scope="module")
def model(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fusing") / "model.safetensors"
    save_file(tensors, path)
    return path


@pytest.fixture(scope="module", params=(True, False), ids=("fast-path", "asgi"))
def fused(model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    options = settings(model=(f"f={model}",), fuse=("qkv,gate_up",), fast_path=request.param)
    with serving(options) as served:
        yield served


@pytest.fixture(scope="module")
def apart(model: Path) -> Iterator[Served]:
    with serving(settings(model=(f"f={model}",))) as served:
        yield served


def outputs(reply: Reply) -> dict[str, Tensor]:
    """Every output that came as bytes, in turn."""
    assert reply.status == 200, reply.body
    at = int(reply.headers[HEADER_LENGTH.lower()])
    found: dict[str, Tensor] = {}
    for output in reply.json["outputs"]:
        size = output["parameters"]["binary_data_size"]
        data = bytearray(reply.body[at : at + size])
        at += size
        dtype = TORCH[output["datatype"]]
        y = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        found[output["name"]] = y.view(output["shape"])
    assert at == len(reply.body)
    return found


def ask(served: Served, layer: str, x: Tensor, *names: str, **parameters: object) -> dict[str, Tensor]:
    asked = [{"name": name, "parameters": {"binary_data": True, **parameters}} for name in names]
    return outputs(infer(served, layer, *message(x, outputs=asked)))


def rows(m: int) -> Tensor:
    return sparse(m, K, torch.Generator().manual_seed(m))


# --- rules ---


def test_rules_are_known_ones_or_written_out() -> None:
    assert read_rules(()) == ()
    assert read_rules(("qkv", "gate_up")) == KNOWN["qkv"] + KNOWN["gate_up"] == read_rules(("qkv,gate_up",))
    assert read_rules(("in=a+b_2",)) == (Rule("in", ("a", "b_2")),)
    assert settings(fuse="gate_up,in=a+b").fuse_rules()[-1] == Rule("in", ("a", "b"))


@pytest.mark.parametrize(
    "text",
    ["", "qvk", "a+b", "n=", "n=a", "n=a+", "n=a+y", "n=a.b+c", "a,b->n", "n=" + "+".join("abcdefghi")],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--fuse is .*it must be qkv, gate_up or NAME=PART\+PART"):
        read_rules((text,))


@pytest.mark.parametrize("texts", [("qkv", "n=q_proj+o_proj"), ("n=a+a",), ("n=a+b", "m=b+c")], ids=str)
def test_a_module_is_part_of_one_layer_at_most(texts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="twice"):
        read_rules(texts)


# --- served ---


def test_the_parts_are_listed_as_outputs(fused: Served) -> None:
    metadata = call(fused, "GET", f"/v2/models/{LAYER}").json
    assert [(each["name"], each["shape"]) for each in metadata["outputs"]] == [
        ("y", [-1, 227]),
        ("q_proj", [-1, 130]),
        ("k_proj", [-1, 33]),
        ("v_proj", [-1, 64]),
    ]
    config = call(fused, "GET", f"/v2/models/{LAYER}/config").json
    assert (config["n"], config["k"], config["bias"], config["source_dtype"]) == (227, K, True, "F32")
    assert config["parts"][1] == {"name": "k_proj", "start": 130, "stop": 163}
    assert 0 <= config["arithmetic_error"] < 2**-8
    assert 0 < call(fused, "GET", "/v2/models/f.b.gate_up_proj/config").json["quantization_error"] < 0.1
    names = [entry["name"] for entry in call(fused, "POST", "/v2/repository/index").json]
    assert sorted(names) == ["f.a.o_proj", LAYER, "f.b.gate_up_proj"]


@pytest.mark.parametrize("m", [1, 5, 129])
def test_parts_have_the_exact_result_and_the_bits_of_layers_that_are_apart(
    fused: Served, apart: Served, tensors: dict[str, Tensor], m: int
) -> None:
    """On data whose sums are exact in any order; guards columns that are off by one part or one row."""
    x = rows(m).to(torch.bfloat16)
    forwards = fused.engine.layers[LAYER].stats.executions
    found = ask(fused, LAYER, x, "v_proj", "y", "q_proj", "k_proj")
    assert list(found) == ["v_proj", "y", "q_proj", "k_proj"]
    assert fused.engine.layers[LAYER].stats.executions == forwards + 1
    for name in ROWS:
        exact = reference(x, tensors[f"a.{name}.weight"], tensors[f"a.{name}.bias"])
        assert_same_bits(found[name], rounded_once(exact))
        assert_same_bits(found[name], ask(apart, f"f.a.{name}", x, "y")["y"])
    assert_same_bits(found["y"], torch.cat([found[name] for name in ROWS], dim=1))


@pytest.mark.parametrize("m", [1, 7])
def test_parts_of_any_data_are_within_the_tolerance(
    fused: Served, tensors: dict[str, Tensor], m: int
) -> None:
    x = spread(m, K, seed=m)
    found = ask(fused, "f.b.gate_up_proj", x, "up_proj", "gate_proj")
    for name, y in found.items():
        assert_rows_close(y, reference(x, tensors[f"b.{name}.weight"]))


@pytest.mark.parametrize("lead", [(3,), (2, 2), (0,)], ids=str)
@pytest.mark.parametrize("asked", TORCH)
def test_shapes_and_datatypes_are_those_of_any_output(
    fused: Served, lead: tuple[int, ...], asked: str
) -> None:
    x = rows(4)[: int(np.prod(lead))].view(*lead, K)
    found = ask(fused, LAYER, x, "k_proj", "y", datatype=asked)
    assert (found["k_proj"].shape, found["y"].shape) == ((*lead, 33), (*lead, 227))
    assert {y.dtype for y in found.values()} == {TORCH[asked]}
    assert_same_bits(found["k_proj"], found["y"][..., 130:163])


def test_no_outputs_named_are_all_of_them(fused: Served) -> None:
    x = rows(2).to(torch.bfloat16)
    every = outputs(infer(fused, LAYER, *message(x)))
    assert list(every) == ["y", *ROWS]
    unnamed = outputs(infer(fused, LAYER, raw(x), 0))
    assert all(torch.equal(every[name], unnamed[name]) for name in every)
    assert list(outputs(infer(fused, "f.a.o_proj", *message(x)))) == ["y"]


def test_json_and_bytes_in_one_answer(fused: Served) -> None:
    x = rows(2)
    asked = [{"name": "q_proj"}, {"name": "v_proj", "parameters": {"binary_data": True}}]
    reply = infer(fused, LAYER, json_message(x, outputs=asked))
    first, second = reply.json["outputs"]
    assert ("data" in first, "data" in second) == (True, False)
    straight = ask(fused, LAYER, x, "q_proj", "v_proj")
    assert torch.equal(torch.tensor(first["data"]).view(2, 130), straight["q_proj"])
    assert reply.body[int(reply.headers[HEADER_LENGTH.lower()]) :] == raw(straight["v_proj"])


def test_wrong_outputs_are_refused(fused: Served) -> None:
    x = rows(1)
    unknown = infer(fused, LAYER, *message(x, outputs=[{"name": "o_proj"}]))
    assert (unknown.status, unknown.json["code"]) == (400, "output_unknown")
    assert unknown.json["expected"] == ["y", *ROWS]
    mixed = [{"name": name, "parameters": {"datatype": t}} for name, t in (("y", "FP32"), ("q_proj", "BF16"))]
    refused = infer(fused, LAYER, *message(x, outputs=mixed))
    assert (refused.status, refused.json["code"]) == (400, "dtype_unsupported")
    assert "in one datatype" in refused.json["error"]


def test_a_part_is_no_layer_of_its_own_and_says_where_it_is(fused: Served) -> None:
    refused = infer(fused, "f.a.q_proj", *message(rows(1)))
    assert (refused.status, refused.json["code"]) == (404, "layer_unknown")
    says = f"fused into layer '{LAYER}'; ask that for its output 'q_proj', and refit it as a whole"
    assert refused.json["error"].endswith(says)
    assert call(fused, "GET", "/v2/models/f.a.z_proj").json["error"].startswith("There is no layer")


def test_a_large_answer_counts_every_output(model: Path) -> None:
    with serving(settings(model=(f"f={model}",), fuse=("qkv",), max_body_bytes=2048)) as small:
        x = rows(2).to(torch.bfloat16)
        assert ask(small, LAYER, x, "y")["y"].shape == (2, 227)
        refused = infer(small, LAYER, *message(torch.cat([x, x, x])))
        assert (refused.status, refused.json["code"]) == (413, "answer_too_large")
        assert refused.json["got"] == 6 * 2 * 227 * 2


def test_tritonclient_gets_several_outputs_of_one_request(fused: Served) -> None:
    x = rows(3)
    tensor = triton.InferInput("x", [3, K], "FP32")
    tensor.set_data_from_numpy(x.numpy())
    with triton.InferenceServerClient(fused.url.removeprefix("http://")) as client:
        asked = [triton.InferRequestedOutput(name) for name in ("k_proj", "v_proj")]
        result = client.infer(LAYER, [tensor], outputs=asked)
    straight = ask(fused, LAYER, x, "k_proj", "v_proj")
    for name in ("k_proj", "v_proj"):
        assert np.array_equal(result.as_numpy(name), straight[name].numpy())
    assert result.as_numpy("y") is None


def test_the_client_gets_several_outputs_of_one_request(fused: Served) -> None:
    x = rows(3)
    with gemmwire.Client(fused.url) as client:
        forwards = client.stats(LAYER)["execution_count"]
        answer = client.call(LAYER, x, outputs=("v_proj", "q_proj"))
        assert client.stats(LAYER)["execution_count"] == forwards + 1
        whole = client.call(LAYER, x)
        with pytest.raises(gemmwire.BadRequest, match="Output 'o_proj' is not one of the layer's"):
            client.call(LAYER, x, outputs=["o_proj"])
        for wrong in ("q_proj", (), ("y", "y"), (1,)):
            with pytest.raises(gemmwire.InvalidArgument, match="outputs is"):
                client.call(LAYER, x, outputs=wrong)  # type: ignore[arg-type]
    assert list(answer.outputs) == ["v_proj", "q_proj"]
    assert answer.y is None
    assert whole.y is whole.outputs["y"]
    assert_same_bits(answer.outputs["q_proj"], whole.y[:, :130])
    assert_same_bits(answer.outputs["v_proj"], whole.y[:, 163:])

    async def ask_too() -> Any:
        async with gemmwire.AsyncClient(fused.url) as client:
            return (await client.call(LAYER, x, outputs=["k_proj"])).outputs["k_proj"]

    assert_same_bits(asyncio.run(ask_too()), whole.y[:, 130:163])


def test_a_fused_layer_is_refitted_whole(model: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    from safetensors.torch import save

    weight = torch.cat([tensors[f"a.{name}.weight"] for name in ROWS]).flip(0).contiguous()
    bias = torch.zeros(227)
    with serving(settings(model=(f"f={model}",), fuse=("qkv",))) as served:
        body = save({"weight": weight, "bias": bias})
        reply = call(served, "PUT", f"/v2/repository/models/{LAYER}/weights", body)
        assert reply.status == 200, reply.body
        x = rows(4).to(torch.bfloat16)
        found = ask(served, LAYER, x, "k_proj")["k_proj"]
        assert_same_bits(found, rounded_once(reference(x, weight[130:163])))
        part = call(served, "PUT", "/v2/repository/models/f.a.k_proj/weights", save({"weight": weight[:33]}))
        assert (part.status, json.loads(part.body)["code"]) == (404, "layer_unknown")
