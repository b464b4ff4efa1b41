"""infer and call: what is sent, what comes back, what is refused before anything is sent."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import gemmwire
from gemmwire import Client, GemmwireError, InputError, InvalidArgument
from scripted_layer import B, Computing, K, N, W, X, Y, client, layer, sent_json
from scripted_server import serve


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(lambda x: x, id="numpy-float32"),
        pytest.param(lambda x: x.astype(np.float16), id="numpy-float16"),
        pytest.param(lambda x: x.astype(ml_dtypes.bfloat16), id="numpy-bfloat16"),
        pytest.param(torch.tensor, id="torch-float32"),
        pytest.param(lambda x: torch.tensor(x).half(), id="torch-float16"),
        pytest.param(lambda x: torch.tensor(x).bfloat16(), id="torch-bfloat16"),
    ],
)
@pytest.mark.parametrize("shape", [(2, 4), (1, 2, 4), (2, 1, 1, 4), (4,), (0, 4), (2, 0, 4)], ids=str)
def test_y_is_like_x(convert: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    """Guards: leading dimensions that are lost, and y in another framework or type than x."""
    x = convert(X.reshape(-1)[: prod(shape)].reshape(shape))
    y = client(Computing()).infer("a", x)

    assert (type(y), y.dtype, tuple(y.shape)) == (type(x), x.dtype, (*shape[:-1], N))
    expected = Y.reshape(-1)[: prod(y.shape)].reshape(tuple(y.shape))
    assert y.tolist() == expected.tolist()


def test_infer_over_a_socket() -> None:
    """Guards: a client that works with its own fake transport only."""
    with serve(layer) as served, Client(served.url) as c:
        assert c.infer("a", X).tolist() == Y.tolist()
        assert torch.equal(c.infer("a", torch.tensor(X).bfloat16()), torch.tensor(Y).bfloat16())
    assert served.connections == 1


def test_threads_on_one_client_get_their_own_answers() -> None:
    """Guards: answers that change places between 32 callers."""
    failures: list[object] = []

    def work(c: Client, number: int) -> None:
        for turn in range(20):
            x = np.full((1 + turn, K), number * 32 + turn, np.float32)
            try:
                got = c.call("a", x, request_id=f"{number}/{turn}")
            except GemmwireError as error:
                failures.append(error)
                return
            if got.request_id != f"{number}/{turn}" or not np.array_equal(got.y, x @ W.T + B):
                failures.append((number, turn))

    with serve(layer) as served, Client(served.url, max_connections=8) as c:
        threads = [threading.Thread(target=work, args=(c, number)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    assert served.connections <= 8


@pytest.mark.parametrize(
    ("output_dtype", "dtype"),
    [
        pytest.param("FP16", np.float16, id="wire-name"),
        pytest.param(np.float16, np.float16, id="numpy"),
        pytest.param(ml_dtypes.bfloat16, ml_dtypes.bfloat16, id="ml_dtypes"),
        pytest.param(torch.bfloat16, ml_dtypes.bfloat16, id="torch-dtype-for-numpy"),
    ],
)
def test_y_has_the_dtype_that_was_asked_for(output_dtype: object, dtype: Any) -> None:
    """Guards: an output_dtype that is converted here, after a rounding to x's dtype on the server."""
    transport = Computing()
    y = client(transport).infer("a", X, output_dtype=output_dtype)
    assert y.dtype == np.dtype(dtype)
    assert y.astype(np.float32).tolist() == Y.tolist()


def test_the_request_is_the_protocol_s() -> None:
    """Guards: a path, a header or a parameter that the server does not know."""
    transport = Computing()
    c = client(transport, headers={"Authorization": "Bearer k"}, timeout=5)
    c.call("a b/c", X, output_dtype="FP16", version=3, timeout=0.25, request_id="r-1")

    (request,) = transport.requests
    head = bytes(request.body[0])
    assert (request.method, request.path) == ("POST", "/p/v2/models/a%20b%2Fc/versions/3/infer")
    assert request.headers == {
        "host": "h:1",
        "user-agent": f"gemmwire/{gemmwire.__version__}",
        "accept-encoding": "identity",
        "authorization": "Bearer k",
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
        "x-request-id": "r-1",
    }
    assert json.loads(head) == {
        "inputs": [
            {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
        ],
        "id": "r-1",
        "parameters": {"timeout": 250_000},
        "outputs": [{"name": "y", "parameters": {"binary_data": True, "datatype": "FP16"}}],
    }
    assert bytes(request.body[1]) == X.tobytes()
    assert transport.timeouts == [0.25]


def test_the_client_s_timeout_is_the_default_of_every_call() -> None:
    """Guards: a server that computes for a caller who has gone, and a wait without end."""
    transport = Computing()
    client(transport).infer("a", X)
    client(transport, timeout=None).infer("a", X)
    assert transport.timeouts == [60.0, None]
    assert "parameters" not in sent_json(transport)
    client(transport, timeout=1e-9).infer("a", X)
    assert sent_json(transport)["parameters"] == {"timeout": 1}, "0 would be no deadline"


def test_an_answer_says_what_made_it() -> None:
    """Guards: facts that the server sends and the client drops."""
    got = client(Computing()).call("a", X, request_id="r")
    facts = (got.version, got.backend, got.bucket, got.queue_us, got.device_us, got.request_id)
    assert facts == ("7", "test", 8, 3, 5, "r")

    empty = client(Computing()).call("a", X[:0])
    assert (empty.backend, empty.bucket, empty.queue_us, empty.device_us) == ("test", None, None, None)


BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"x": [[1.0]]}, InputError, "x is of type list"),
    "float64": ({"x": np.ones((2, 4))}, InputError, "x is float64"),
    "layer-empty": ({"layer": ""}, InvalidArgument, "layer is ''"),
    "layer-none": ({"layer": None}, InvalidArgument, "layer is None"),
    "version-parent": ({"version": ".."}, InvalidArgument, "version is '..'"),
    "output-dtype": ({"output_dtype": "FP64"}, InvalidArgument, "output_dtype is 'FP64'"),
    "timeout-0": ({"timeout": 0}, InvalidArgument, "timeout is 0"),
    "timeout-of-years": ({"timeout": 1e8}, InvalidArgument, r"at most 2000000 \(23 days\)"),
    "timeout-negative": ({"timeout": -1.0}, InvalidArgument, "timeout is -1.0"),
    "timeout-nan": ({"timeout": float("nan")}, InvalidArgument, "timeout is nan"),
    "timeout-infinite": ({"timeout": float("inf")}, InvalidArgument, "timeout is inf"),
    "timeout-true": ({"timeout": True}, InvalidArgument, "timeout is True"),
    "timeout-text": ({"timeout": "1"}, InvalidArgument, "timeout is '1'"),
    "id-empty": ({"request_id": ""}, InvalidArgument, "request_id is ''"),
    "id-with-line-break": ({"request_id": "a\r\nx: y"}, InvalidArgument, "visible ASCII"),
    "id-not-ascii": ({"request_id": "\u00fc"}, InvalidArgument, "visible ASCII"),
    "id-too-long": ({"request_id": "a" * 129}, InvalidArgument, "1 to 128"),
    "id-number": ({"request_id": 5}, InvalidArgument, "request_id is 5"),
}


@pytest.mark.parametrize(("arguments", "kind", "words"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_a_call_that_cannot_be_made_sends_nothing(
    arguments: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """Guards: a mistake that costs a round trip, or splits the request in two."""
    transport = Computing()
    with pytest.raises(kind, match=words):
        client(transport).infer(**{"layer": "a", "x": X, **arguments})
    assert transport.requests == []


def test_bfloat16_that_could_not_come_back_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards: an answer that was computed and cannot be handed out."""
    transport = Computing()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(InputError, match="y cannot come back as BF16: NumPy has no bfloat16"):
        client(transport).infer("a", X, output_dtype="BF16")
    assert transport.requests == []
