"""Requests that a connection sends again with other numbers: what is known of them is used, and only then."""

from __future__ import annotations

import gc
import json
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from gemmwire_service.repeat import Repeat
from http_calls import call, message, raw
from links import GOOD, REQUESTS, X, answers, ask, body_of, held, linked, request, statuses, steady
from oracle import assert_same_bits, spread
from serving import Served, serving, settings, until
from shm_objects import FOLDER, PREFIX, made


def quantized(turned: bool) -> bytes:
    """x of 3 rows as codes and scales, or as scales and codes: 1.0 times powers of two."""
    codes, scales = torch.full((3, 128), 0x38, dtype=torch.uint8), torch.full((3, 4), 127, dtype=torch.uint8)
    parts = [("x_e4m3", codes), ("x_scale_e8m0", scales)]
    parts = parts[::-1] if turned else parts
    inputs = [
        {
            "name": name,
            "shape": list(x.shape),
            "datatype": "UINT8",
            "parameters": {"binary_data_size": x.numel()},
        }
        for name, x in parts
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return request(head + b"".join(raw(x) for _, x in parts), len(head))


@pytest.mark.parametrize(
    "sent",
    [*REQUESTS.values(), quantized(False), quantized(True)],
    ids=[*REQUESTS, "quantized", "scales-first"],
)
def test_every_answer_is_the_one_that_asgi_gives(fast: Served, asgi: Served, sent: bytes) -> None:
    with linked(asgi) as link:
        expected = steady(ask(link, sent))
    with linked(fast) as link:
        for _ in range(5):
            got = ask(link, sent)
            assert steady(got) == expected
            if b"connection: close" in got.lower():
                break


@pytest.mark.parametrize("name", ["binary", "raw", "version", "request-id", "id-and-timeout"])
def test_the_third_is_known(fast: Served, repeated: list[Repeat], name: str) -> None:
    with linked(fast) as link:
        for _ in range(5):
            ask(link, REQUESTS[name])
    assert len(repeated) == 3


@pytest.mark.parametrize(
    "name", ["json", "no-rows", "binary-in-json-out", "wrong-k", "unknown-layer", "chunked"]
)
def test_these_never_are(fast: Served, repeated: list[Repeat], name: str) -> None:
    with linked(fast) as link:
        for _ in range(4):
            ask(link, REQUESTS[name])
    assert not repeated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_each_answer_is_of_its_own_numbers(
    fast: Served, repeated: list[Repeat], dtype: torch.dtype, rows: int
) -> None:
    xs = [spread(rows, 128, seed).to(dtype) for seed in range(8)]
    expected = []
    for x in xs:
        with linked(fast) as link:
            expected.append(body_of(ask(link, request(*message(x))))[1])
    assert len(set(expected)) == len(xs)
    assert not repeated
    with linked(fast) as link:
        got = [body_of(ask(link, request(*message(x))))[1] for x in xs]
    assert got == expected
    assert len(repeated) == len(xs) - 2


def test_one_that_differs_in_its_json_part_alone_has_its_own_answer(
    fast: Served, repeated: list[Repeat]
) -> None:
    one, other = request(*message(X, id="1")), request(*message(X, id="2"))
    assert len(one) == len(other)
    with linked(fast) as link:
        for sent in (one, one, one, other, one, other, other):
            document, _ = body_of(ask(link, sent))
            assert document["id"] == ("1" if sent is one else "2")
    assert repeated


def test_rows_may_change_from_one_to_the_next(fast: Served) -> None:
    with linked(fast) as link:
        for rows in (1, 1, 1, 2, 1, 1, 1, 3, 3, 3, 1):
            document, data = body_of(ask(link, request(*message(X[:1].repeat(rows, 1)))))
            assert document["outputs"][0]["shape"][0] == rows
            assert data == data[: len(data) // rows] * rows


def test_one_may_come_in_pieces_or_with_the_next_behind_it(fast: Served, repeated: list[Repeat]) -> None:
    with linked(fast) as link:
        *_, expected = [body_of(ask(link, GOOD))[1] for _ in range(4)]
        assert repeated
        for _ in range(3):
            link.sendall(GOOD * 3)
            assert [body_of(each)[1] for each in answers(link, 3)] == [expected] * 3
        for cut in (1, len(GOOD) - 700, len(GOOD) - 1):
            link.sendall(GOOD[:cut])
            time.sleep(0.01)
            link.sendall(GOOD[cut:])
            assert body_of(answers(link, 1)[0])[1] == expected


@pytest.mark.parametrize(
    "fields", [{}, {"inference_header_content_length": "0000002048"}], ids=["none", "all"]
)
def test_json_that_is_as_long_as_its_x_is_read_as_json(
    fast: Served, repeated: list[Repeat], fields: dict[str, Any]
) -> None:
    """Guards: the text of a request computed as the numbers that it spells."""
    with linked(fast) as link:
        for number in (1, 1, 1, 2, 2):
            x = torch.full((4, 128), float(number))
            tensor = {"name": "x", "shape": [4, 128], "datatype": "FP32", "data": [number] * 512}
            body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
            got = body_of(ask(link, request(body.ljust(x.numel() * 4), **fields)))[1]
            with linked(fast) as other:
                assert got == body_of(ask(other, request(*message(x))))[1]
    assert not repeated


@pytest.mark.skipif(not Path(FOLDER).is_dir(), reason=f"needs {FOLDER}")
def test_json_that_is_as_long_as_the_x_it_names_is_read_as_json(
    checkpoint: Path, repeated: list[Repeat]
) -> None:
    options = settings(model=(f"m={checkpoint}",), shm_prefix=PREFIX)
    with serving(options) as served, made(512, "named") as found, linked(served) as link:
        register = json.dumps({"key": found.key, "byte_size": 512}).encode()
        assert call(served, "POST", "/v2/systemsharedmemory/region/r/register", register).status == 200
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 512}
        tensor = {"name": "x", "shape": [1, 128], "datatype": "FP32", "parameters": place}
        body = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        for seed in range(5):
            x = spread(1, 128, seed)
            found.put(raw(x))
            got = body_of(ask(link, request(body.ljust(512))))[1]
            with linked(served) as other:
                assert got == body_of(ask(other, request(*message(x))))[1]
    assert not repeated


def refit(served: Served, weight: Tensor) -> None:
    path = "/v2/repository/models/m.plain/weights"
    assert call(served, "PUT", path, save({"weight": weight})).status == 200


def test_after_a_refit_the_new_weight_answers_under_its_version(
    checkpoint: Path, repeated: list[Repeat]
) -> None:
    pinned = request(*message(X[:1]), path="/v2/models/m.plain/versions/1/infer")
    with (
        serving(settings(model=(f"m={checkpoint}",))) as served,
        linked(served) as link,
        linked(served) as old,
    ):
        n = served.engine.layers["m.plain"].spec.n
        for _ in range(3):
            ask(link, request(*message(X[:1])))
            assert statuses([ask(old, pinned)]) == [200]
        assert len(repeated) == 2
        refit(served, torch.zeros(n, 128))
        document, data = body_of(ask(link, request(*message(X[:1]))))
        assert document["model_version"] == "2"
        assert_same_bits(torch.frombuffer(bytearray(data), dtype=torch.float32), torch.zeros(n))
        answer = ask(old, pinned)
        assert statuses([answer]) == [404]
        assert body_of(answer)[0]["code"] == "version_unknown"


def test_a_pinned_version_that_is_replaced_meanwhile_is_refused(
    checkpoint: Path, repeated: list[Repeat]
) -> None:
    """Guards: the answer of one weight for a request that is for another."""
    pinned = request(*message(X[:1]), path="/v2/models/m.plain/versions/1/infer")
    with serving(settings(model=(f"m={checkpoint}",))) as served, linked(served) as link:
        for _ in range(3):
            ask(link, pinned)
        with held(served):
            link.sendall(pinned)
            until(lambda: served.engine.waiting == 1, "the request did not arrive")
            assert len(repeated) == 2
            served.engine.layers["m.plain"].version = 2
        assert body_of(answers(link, 1)[0])[0]["code"] == "version_unknown"


def test_a_layer_that_is_gone_is_not_asked(checkpoint: Path, tmp_path: Path, repeated: list[Repeat]) -> None:
    (tmp_path / "m").mkdir()
    shutil.copy(checkpoint, tmp_path / "m" / "model.safetensors")
    options = settings(model=(f"m={tmp_path / 'm'}",), model_root=str(tmp_path))
    with serving(options) as served, linked(served) as link:
        for _ in range(3):
            ask(link, GOOD)
        assert repeated
        layer = weakref.ref(served.engine.layers["m.plain"])
        assert call(served, "POST", "/v2/repository/models/m/unload").status == 200
        gc.collect()
        until(lambda: layer() is None, "its weight is kept by an idle connection")
        assert statuses([ask(link, GOOD) for _ in range(2)]) == [404, 404]
        assert call(served, "POST", "/v2/repository/models/m/load").status == 200
        before = len(repeated)
        assert statuses([ask(link, GOOD) for _ in range(4)]) == [200] * 4
        assert len(repeated) > before
        assert repeated[-1].spec is served.engine.layers["m.plain"].spec


def test_its_deadline_is_counted_from_its_own_arrival(fast: Served, repeated: list[Repeat]) -> None:
    sent = request(*message(X), gemmwire_timeout_us="300000")
    with linked(fast) as link:
        assert statuses([ask(link, sent) for _ in range(4)]) == [200] * 4
        with held(fast):
            assert statuses([ask(link, sent)]) == [504]
        assert statuses([ask(link, sent)]) == [200]
    assert len(repeated) == 4


def test_a_stopping_server_answers_one_and_closes(checkpoint: Path, repeated: list[Repeat]) -> None:
    options = settings(model=(f"m={checkpoint}",))
    with serving(options) as served, linked(served) as idle, linked(served) as link:
        for _ in range(3):
            ask(link, GOOD)
        with held(served):
            link.sendall(GOOD)
            until(lambda: served.engine.waiting == 1, "the request did not arrive")
            served.stop()
            assert idle.recv(1) == b""
        answer = answers(link, 1)[0]
        assert statuses([answer]) == [200]
        assert b"connection: close" in answer
        assert link.recv(1) == b""
    assert len(repeated) == 2


def test_a_client_that_leaves_leaves_nothing_behind(fast: Served, repeated: list[Repeat]) -> None:
    with held(fast), linked(fast) as link:
        link.sendall(GOOD)
        until(lambda: fast.engine.waiting == 1, "the request did not arrive")
    with linked(fast) as link:
        for _ in range(3):
            ask(link, GOOD)
        with held(fast):
            link.sendall(GOOD)
            until(lambda: fast.engine.waiting == 1, "the request did not arrive")
            assert len(repeated) == 2
            link.close()
            until(lambda: fast.lane.begun == 0, "it is still under way")
    until(lambda: fast.engine.waiting == 0, "it still waits")
    held_bytes = fast.lane.held
    assert (held_bytes.receiving, held_bytes.waiting, held_bytes.unread) == (0, 0, 0)


@pytest.mark.parametrize(
    "sent",
    [
        request(*message(torch.ones(200, 128))),  # 100 KB
        request(*message(torch.ones(1, 32)), path="/v2/models/tall/infer"),  # 800 KB
        request(*message(X, id="i" * 129)),  # whose answer's text is not remembered either
    ],
    ids=["x", "y", "id"],
)
def test_what_is_large_is_not_kept(fast: Served, repeated: list[Repeat], sent: bytes) -> None:
    with linked(fast) as link:
        for _ in range(4):
            assert statuses([ask(link, sent)]) == [200]
    assert not repeated
