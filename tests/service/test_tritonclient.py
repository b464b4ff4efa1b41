"""The unmodified tritonclient, sync and asyncio, against a real server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from torch import Tensor
from tritonclient.utils import InferenceServerException

from oracle import assert_rows_close, reference, spread
from serving import Served

NUMPY = {"FP32": np.float32, "FP16": np.float16, "BF16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as connected:
        yield connected


def infer_input(x: Tensor, datatype: str, binary: bool) -> Any:
    array = x.numpy().astype(NUMPY[datatype])
    result = triton.InferInput("x", list(x.shape), datatype)
    result.set_data_from_numpy(array, binary_data=binary)
    return result


def check(result: Any, x: Tensor, weights: dict[str, Tensor], layer: str = "ragged") -> None:
    y = torch.from_numpy(np.asarray(result.as_numpy("y")).astype(np.float32))
    assert_rows_close(y, reference(x, weights[f"{layer}.weight"], weights.get(f"{layer}.bias")))


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m.ragged")
    assert client.is_model_ready("m.ragged", "1")
    assert not client.is_model_ready("nowhere")
    assert client.get_server_metadata()["name"] == "gemmwire"
    assert client.get_model_metadata("m.ragged", "1")["inputs"][0]["shape"] == [-1, 33]
    assert client.get_model_config("m.ragged")["backend"] == "emulation"
    assert {"m.ragged", "demo.lm_head"} <= {entry["name"] for entry in client.get_model_repository_index()}
    assert client.get_inference_statistics("m.ragged")["model_stats"][0]["name"] == "m.ragged"
    assert len(client.get_inference_statistics()["model_stats"]) == 33


@pytest.mark.parametrize("binary_out", [True, False], ids=["binary-out", "json-out"])
@pytest.mark.parametrize("binary_in", [True, False], ids=["binary-in", "json-in"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16"])
def test_infer(
    client: Any, weights: dict[str, Tensor], datatype: str, binary_in: bool, binary_out: bool
) -> None:
    x = spread(5, 33, seed=4) / 64
    result = client.infer(
        "m.ragged",
        [infer_input(x, datatype, binary_in)],
        outputs=[triton.InferRequestedOutput("y", binary_data=binary_out)],
        request_id="r-1",
    )
    assert result.get_response()["id"] == "r-1"
    assert result.get_output("y")["datatype"] == datatype
    check(result, x, weights)


def test_infer_bf16_is_not_truncated(client: Any, weights: dict[str, Tensor]) -> None:
    x = spread(5, 33, seed=5)
    result = client.infer("m.ragged", [infer_input(x, "BF16", True)])
    y = result.as_numpy("y")
    assert y.dtype == ml_dtypes.bfloat16
    check(result, x, weights)


def test_infer_without_outputs_and_with_compression(client: Any, weights: dict[str, Tensor]) -> None:
    x = spread(3, 33, seed=6)
    for algorithm in (None, "gzip", "deflate"):
        result = client.infer(
            "m.ragged",
            [infer_input(x, "FP32", True)],
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        check(result, x, weights)


def test_async_infer_matches_answers_to_requests(client: Any, weights: dict[str, Tensor]) -> None:
    xs = [spread(m, 33, seed=m) for m in range(1, 13)]
    pending = [client.async_infer("m.ragged", [infer_input(x, "FP32", True)]) for x in xs]
    for x, answer in zip(xs, pending, strict=True):
        check(answer.get_result(), x, weights)


def test_errors_carry_the_sentence_and_the_status(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"takes x\[..., 33\]") as raised:
        client.infer("m.ragged", [infer_input(torch.ones(1, 32), "FP32", True)])
    assert raised.value.status() == "400"
    with pytest.raises(InferenceServerException, match="no layer 'nowhere'"):
        client.infer("nowhere", [infer_input(torch.ones(1, 32), "FP32", True)])
    with pytest.raises(InferenceServerException, match="sequence"):
        client.infer("m.ragged", [infer_input(torch.ones(1, 33), "FP32", True)], sequence_id=1)


def test_a_generous_timeout_does_not_disturb(client: Any, weights: dict[str, Tensor]) -> None:
    x = spread(1, 33, seed=1)
    check(client.infer("m.ragged", [infer_input(x, "FP32", True)], timeout=30_000_000), x, weights)


def test_the_asyncio_client(server: Served, weights: dict[str, Tensor]) -> None:
    async def test() -> None:
        async with triton_aio.InferenceServerClient(server.url.removeprefix("http://")) as client:
            assert await client.is_server_ready()
            metadata = await client.get_model_metadata("m.ragged")
            assert metadata["outputs"][0]["shape"] == [-1, 130]
            xs = [spread(m, 33, seed=m) for m in range(1, 13)]
            answers = await asyncio.gather(
                *(client.infer("m.ragged", [infer_input(x, "FP32", True)]) for x in xs)
            )
            for x, answer in zip(xs, answers, strict=True):
                check(answer, x, weights)
            with pytest.raises(InferenceServerException, match="no layer"):
                await client.infer("nowhere", [infer_input(xs[0], "FP32", True)])

    asyncio.run(test())


def test_this_is_the_real_package() -> None:
    assert "site-packages" in (sys.modules["tritonclient.http"].__file__ or "")
