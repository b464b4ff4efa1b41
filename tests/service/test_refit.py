"""Refit under traffic: what answers carry which version, what a failure leaves, what it costs in memory."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

import gemmwire_service.backends.storage as storage
import gemmwire_service.refit as refit_module
from gemmwire import Answer, BadRequest, Client, ServerFailed
from gemmwire_service import backends
from gemmwire_service.backends.base import LayerSpec, Plan, PreparedWeight
from gemmwire_service.backends.emulation import Emulation, EmulationWeight
from gemmwire_service.check import judge
from gemmwire_service.checkpoint.float_layer import quantize_layer
from gemmwire_service.engine import State
from gemmwire_service.errors import WeightsRefused
from gemmwire_service.layer import Layer
from gemmwire_service.mxfp8.fidelity import Fidelity
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.refit import Refit, Refitted, Source
from gemmwire_service.shadow import Shadow
from http_calls import HEADER_LENGTH, call, json_message, message
from oracle import reference, rounded_once, sparse, spread
from scripted_backend import ScriptedBackend
from serving import Served, hold, hold_reading, serving, settings, until

N, K = 200, 384  # more elements than oneDNN packs from
ROWS = 3
REFITS, FORWARDS = 20, 200


def weight(seed: int) -> Tensor:
    return sparse(N, K, torch.Generator().manual_seed(seed))


BIAS = torch.arange(N) / 16
X = sparse(ROWS, K, torch.Generator().manual_seed(100))


def expected(seed: int) -> Tensor:
    """BF16 [m, N], exact before its one rounding: the same in every order of summation, at any M."""
    return rounded_once(reference(X, weight(seed), BIAS))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Layer m.l, with a bias, in version 1 of weight(0)."""
    path = tmp_path / "model.safetensors"
    save_file({"l.weight": weight(0), "l.bias": BIAS}, path)
    with serving(settings(model=(f"m={path}",), max_bucket=64)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as connected:
        yield connected


def layer_of(served: Served) -> Layer:
    return served.engine.layers["m.l"]


def forward(client: Client) -> Answer:
    return client.call("m.l", X.to(torch.bfloat16))


def assert_serves(client: Client, seed: int, version: int) -> None:
    answer = forward(client)
    assert answer.version == str(version)
    assert torch.equal(answer.y, expected(seed)), f"version {version} does not answer with weight {seed}"


@pytest.mark.parametrize("now_below", [0, 1 << 24], ids=["device-thread", "event-loop-too"])
def test_every_answer_is_that_of_the_version_it_names(
    served: Served, client: Client, now_below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a forward that sees half of a new weight, or an answer that names another version."""
    monkeypatch.setattr("gemmwire_service.device._NOW_UP_TO", now_below)
    by_version = {str(seed + 1): expected(seed) for seed in range(REFITS + 1)}
    assert len({y.view(torch.int16).numpy().tobytes() for y in by_version.values()}) == len(by_version)
    refitted = threading.Event()

    def ask(number: int) -> list[str]:
        times = 50 if number == 0 else 1  # more rows than a bucket has: computed in chunks
        x = X.repeat(times, 1).to(torch.bfloat16)
        seen: list[str] = []
        while not refitted.is_set() or len(seen) < FORWARDS // 8:
            answer = client.call("m.l", x)
            wanted = by_version[answer.version].repeat(times, 1)
            assert torch.equal(answer.y, wanted), f"not version {answer.version}"
            seen.append(answer.version)
        return seen

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        try:
            for seed in range(1, REFITS + 1):
                result = client.refit("m.l", weight(seed), bias=BIAS, if_version=seed)
                assert (result.version, result.previous_version) == (str(seed + 1), str(seed))
        finally:
            refitted.set()
        seen = [each.result() for each in asking]
    assert sum(map(len, seen)) >= FORWARDS
    for versions in seen:
        assert versions == sorted(versions, key=int), "an older version after a newer one"
    assert len(set().union(*seen)) > 2, "no forward came between two refits"
    assert_serves(client, REFITS, REFITS + 1)


def test_ten_refits_leave_the_same_memory(served: Served, client: Client) -> None:
    """Guards: storage that moves under a graph, and a copy of the weight that each refit leaves behind."""
    layer = layer_of(served)
    forms = [route.weight for route in layer.routes.by_bucket.values()]
    held = [tensor for form in forms for tensor in storage.tensors(form)]

    gc.collect()
    before = matrices()
    for seed in range(1, 11):
        client.refit("m.l", weight(seed), bias=BIAS)
        gc.collect()
        assert matrices() == before, f"after refit {seed}"
    now = [route.weight for route in layer.routes.by_bucket.values()]
    assert all(a is b for a, b in zip(forms, now, strict=True))
    assert all(a is b for a, b in zip(held, [t for form in now for t in storage.tensors(form)], strict=True))
    assert_serves(client, 10, 11)


def matrices() -> int:
    return sum(type(found) in (EmulationWeight, MxWeight) for found in gc.get_objects())


def test_a_refit_that_failed_keeps_nothing_either(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an error that holds the new weight, in a cycle, until the collector comes by."""

    def broken(old: Tensor, new: Tensor) -> None:
        raise RuntimeError("copying")

    gc.collect()
    gc.disable()
    logging.disable(logging.CRITICAL)  # pytest keeps what is logged, with the error
    try:
        before = matrices()
        monkeypatch.setattr(storage, "swap", broken)
        for _ in range(3):
            with pytest.raises(ServerFailed):
                client.refit("m.l", weight(1), bias=BIAS)
        until(lambda: matrices() == before, "the new weight is still there")
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()


def test_a_weight_that_is_not_packed_keeps_its_address(tmp_path: Path) -> None:
    """Guards: new storage, of which a captured graph knows nothing."""
    with serving(settings(random_layer=("r=64x96",))) as served, Client(served.url) as client:
        form = served.engine.layers["r"].routes.by_bucket[1].weight
        addresses = [tensor.data_ptr() for tensor in storage.tensors(form)]
        w, x = spread(64, 96) / 2**14, spread(2, 96).to(torch.bfloat16)
        client.refit("r", w)
        assert [tensor.data_ptr() for tensor in storage.tensors(form)] == addresses
        y, want = client.infer("r", x), reference(x, w)
        assert ((y.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 2**-8


def test_resident_memory_does_not_grow(tmp_path: Path) -> None:
    """Guards: a leak below Python, in oneDNN's own memory."""
    size = 2 * 4096 * 2048  # bytes of it in BF16
    with (
        serving(settings(random_layer=("r=4096x2048",), max_bucket=8)) as served,
        Client(served.url) as client,
    ):
        w = np.zeros((4096, 2048), np.float16)
        used = []
        for _ in range(12):
            client.refit("r", w)
            used.append(resident())
    grown = max(used[6:]) - max(used[:6])
    # One that every refit leaves behind would make it six times the size.
    assert grown < 3 * size, f"resident MiB after each refit: {[u >> 20 for u in used]}"


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# --- failures ---

Break = Callable[[pytest.MonkeyPatch], None]


def at_reading(patch: pytest.MonkeyPatch) -> None:
    def fail(body: memoryview, spec: LayerSpec) -> None:
        raise RuntimeError("reading")

    patch.setattr("gemmwire_service.weights.read_weights", fail)


def at_preparing(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Emulation, weight: MxWeight, device: torch.device) -> PreparedWeight:
        raise torch.OutOfMemoryError("preparing")

    patch.setattr(Emulation, "prepare", fail)


def at_the_trial(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Shadow) -> list[Tensor]:
        raise RuntimeError("an illegal memory access was encountered")

    patch.setattr(Shadow, "try_out", fail)


def at_the_judgement(patch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("judging")

    patch.setattr(refit_module, "judge", fail)


def in_the_exchange(number: int) -> Break:
    """The copy of the number-th piece fails, half of it written."""

    def install(patch: pytest.MonkeyPatch) -> None:
        real, calls = storage.swap, iter(range(1000))
        patch.setattr(storage, "PIECE", 1 << 12)

        def swap(old: Tensor, new: Tensor) -> None:
            if next(calls) == number:
                kept = old.clone()
                old.view(-1)[: old.numel() // 2] = 7
                old.copy_(kept)
                raise RuntimeError("copying")
            real(old, new)

        patch.setattr(storage, "swap", swap)

    return install


STAGES = {
    "reading": at_reading,
    "preparing": at_preparing,
    "trial": at_the_trial,
    "judging": at_the_judgement,
    "first-piece": in_the_exchange(0),
    "middle-piece": in_the_exchange(1),
    "last-piece": in_the_exchange(2),
}


@pytest.mark.parametrize("install", STAGES.values(), ids=STAGES.keys())
def test_a_failure_at_any_stage_leaves_the_old_version_to_the_bit(
    install: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a weight of two halves, a version that was bumped before its weight was there."""
    w = spread(64, 96) / 2**14  # not packed: it is exchanged in pieces
    x = spread(5, 96).to(torch.bfloat16)
    with serving(settings(random_layer=("r=64x96",))) as served, Client(served.url) as client:
        before, config = client.call("r", x), client.layer("r").config
        with monkeypatch.context() as patch:
            install(patch)
            with pytest.raises(ServerFailed, match="version 1 is still served"):
                client.refit("r", w)
            assert torch.equal(client.infer("r", x), before.y)
        assert client.call("r", x).version == "1"
        assert torch.equal(client.infer("r", x), before.y)
        assert client.layer("r").config == config
        assert served.engine.state is State.READY
        assert client.refit("r", w).version == "2", "the failure outlives its cause"
        assert not torch.equal(client.infer("r", x), before.y)


def test_a_packed_weight_is_put_back_too(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: oneDNN's own order, which has no views, left half written."""
    assert isinstance(layer_of(served).routes.by_bucket[1].weight, EmulationWeight)
    real = Tensor.copy_

    def failing(self: Tensor, source: Tensor) -> Tensor:
        if self.is_mkldnn and self is not held:
            raise RuntimeError("copying back")
        return real(self, source)

    held = storage.tensors(layer_of(served).routes.by_bucket[1].weight)[0]
    if not held.is_mkldnn:
        pytest.skip("this torch does not pack weights for oneDNN")
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "copy_", failing)
        with pytest.raises(ServerFailed, match="version 1 is still served"):
            client.refit("m.l", weight(1), bias=BIAS)
    assert_serves(client, 0, 1)


def test_a_weight_that_cannot_be_put_back_ends_the_service(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: answers of a weight that is neither the old nor the new one."""

    def broken(old: Tensor, new: Tensor) -> None:
        raise RuntimeError("copying")

    def undo(self: storage.Exchange) -> None:
        raise RuntimeError("restoring")

    monkeypatch.setattr(storage, "swap", broken)
    monkeypatch.setattr(storage.Exchange, "undo", undo)
    reply = call(
        served, "PUT", "/v2/repository/models/m.l/weights", save({"weight": weight(1), "bias": BIAS})
    )
    assert (reply.status, reply.json["code"]) == (503, "device_lost")
    until(lambda: served.engine.state is State.FAILED, "the engine still says that it is ready")
    assert call(served, "GET", "/v2/health/ready").status == 503


def test_every_backend_that_runs_the_layer_gets_the_new_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the buckets that fell to another backend, which answer with the weight from before."""

    def fault(plan: Plan, out: Tensor) -> None:
        if plan.bucket >= 16:
            raise RuntimeError("invalid status")

    scripted = ScriptedBackend(fault=fault)
    monkeypatch.setattr(backends, "PRIORITY", ("scripted", "emulation"))
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "scripted": lambda: scripted})
    w = weight(1)
    with (
        serving(settings(random_layer=(f"r={N}x{K}",), max_bucket=64)) as served,
        Client(served.url) as client,
    ):
        by_bucket = served.engine.layers["r"].routes.by_bucket
        assert {by_bucket[b].backend.name for b in (8, 16)} == {"scripted", "emulation"}
        client.refit("r", w)
        for m, name in ((3, "scripted"), (16, "emulation")):
            x = sparse(m, K, torch.Generator().manual_seed(m))
            answer = client.call("r", x.to(torch.bfloat16))
            assert (answer.backend, answer.version) == (name, "2")
            assert torch.equal(answer.y, rounded_once(reference(x, w)))


def test_forwards_go_on_while_a_weight_is_prepared(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: every request waiting for the quantization of a large weight."""
    reading, gate = hold_reading(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        refitting = pool.submit(client.refit, "m.l", weight(1), bias=BIAS)
        assert reading.wait(30)
        for _ in range(5):
            assert_serves(client, 0, 1)
        gate.set()
        refitting.result()
    assert_serves(client, 1, 2)


def test_requests_that_came_first_get_the_old_weight(served: Served, client: Client) -> None:
    """Guards: a refit that overtakes the queue, and answers that were accepted under another version."""
    gate = threading.Event()
    hold(served.engine, gate)
    with ThreadPoolExecutor(9) as pool:
        first = [pool.submit(forward, client) for _ in range(8)]
        until(lambda: served.engine.waiting == 8, "the requests did not come")
        refitting = pool.submit(client.refit, "m.l", weight(1), bias=BIAS)
        gate.set()
        assert {each.result().version for each in first} == {"1"}
        assert refitting.result().version == "2"
    assert_serves(client, 1, 2)


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_an_answer_of_another_version_than_asked_for_is_refused(
    served: Served, client: Client, binary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a version that was there when the request came, and is not when it is computed."""
    gate, exchanging, real = threading.Event(), threading.Event(), Shadow.exchange

    def slow(self: Shadow) -> None:
        exchanging.set()
        assert gate.wait(30)
        real(self)

    monkeypatch.setattr(Shadow, "exchange", slow)
    body, length = message(X) if binary else (json_message(X.repeat(16, 1)), None)
    headers = {} if length is None else {HEADER_LENGTH: str(length)}
    with ThreadPoolExecutor(2) as pool:
        refitting = pool.submit(client.refit, "m.l", weight(1), bias=BIAS)
        assert exchanging.wait(30)
        asking = pool.submit(call, served, "POST", "/v2/models/m.l/versions/1/infer", body, headers)
        until(lambda: served.engine.waiting == 1, "the request did not come")
        gate.set()
        assert refitting.result().version == "2"
        reply = asking.result()
    assert (reply.status, reply.json["code"], reply.json["expected"]) == (404, "version_unknown", "2")


def test_the_layer_says_where_its_weight_came_from(served: Served, client: Client) -> None:
    """Guards: errors and sources of a weight that is gone."""
    before = client.layer("m.l").config
    result = client.refit("m.l", spread(N, K).to(torch.bfloat16), bias=BIAS)
    config = client.layer("m.l").config
    assert (config["source"], config["source_dtype"]) == ("a refit request", "BF16")
    assert config["quantization_error"] == result.quantization_error != before["quantization_error"]
    assert json.loads(json.dumps(config)) == config


def test_figures_of_the_weight_are_those_of_the_version(served: Served, client: Client) -> None:
    """Guards: figures of a weight that is gone, for one that was quantized here and for one that was not."""
    before = client.layer("m.l").config["weight_fidelity"]
    assert (before["rows"], before["sqnr_db"]) == (N, None), "weight(0) is exact in MXFP8"
    given = spread(N, K).to(torch.bfloat16)
    client.refit("m.l", given, bias=BIAS)
    quantized = MxWeight.from_float(given)
    expected = Fidelity.of(given, quantized.codes, quantized.scales)
    after = client.layer("m.l").config["weight_fidelity"]
    assert after["sqnr_db"] == pytest.approx(expected.sqnr_db, rel=1e-12)
    assert after["flushed"] == expected.flushed / (N * K)
    client.refit("m.l", quantized.codes, scale=quantized.scales, bias=BIAS)
    assert client.layer("m.l").config["weight_fidelity"] is None


def test_figures_of_another_version_are_never_shown(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: config that is asked for between two lines of a refit: at each it has the figures of the
    version that it names, or none."""
    layer = layer_of(served)
    seen: list[tuple[int, bool]] = []
    known = {1: layer.fidelity_of(1)}

    def watch(self: Layer, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        version = self.version
        found = self.fidelity_of(version)
        seen.append((version, found is None or version not in known or found == known[version]))
        assert found is None or version == 1 or found != known[1]

    monkeypatch.setattr(Layer, "__setattr__", watch)
    with Client(served.url) as client:
        client.refit("m.l", spread(N, K).to(torch.bfloat16), bias=BIAS)
    assert {version for version, _ in seen} == {1, 2}
    assert all(right for _, right in seen)
    assert layer.fidelity_of(1) is None
    assert layer.fidelity_of(2) is not None


def test_an_mxfp8_weight_is_served_as_its_bytes_say(client: Client) -> None:
    """Guards: codes that are quantized again, scales that are taken for numbers."""
    quantized = MxWeight.from_float(weight(1))
    result = client.refit(
        "m.l", quantized.codes.view(torch.uint8).numpy(), scale=quantized.scales.numpy(), bias=BIAS.numpy()
    )
    assert result.quantization_error is None, "there is no unquantized weight to compare with"
    assert_serves(client, 1, 2)


def test_a_weight_that_the_backend_cannot_hold_changes_nothing(served: Served, client: Client) -> None:
    """Guards: an Inf in the live weight, found when half of it is there."""
    codes, scale = (
        torch.full((N, K), 0x7E, dtype=torch.uint8),
        torch.full((N, K // 32), 127, dtype=torch.uint8),
    )
    scale[N - 1, -1] = 254
    with pytest.raises(BadRequest, match=r"keeps version 1: weight\[199, 352\] is too large") as caught:
        client.refit("m.l", codes, scale=scale, bias=BIAS)
    assert caught.value.code == "weights_invalid"
    assert_serves(client, 0, 1)


def test_a_backend_that_computes_the_new_weight_wrongly_is_refused(
    served: Served, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a refit that skips what every load has to pass."""
    monkeypatch.setattr(refit_module, "judge", lambda l, w, p, y: judge(l, w, p, y * 2))  # noqa: E741
    reply = call(
        served, "PUT", "/v2/repository/models/m.l/weights", save({"weight": weight(1), "bias": BIAS})
    )
    assert (reply.status, reply.json["code"]) == (400, "weights_invalid")
    assert "computes layer 'm.l' wrongly" in reply.json["error"]
    assert_serves(client, 0, 1)


# --- many layers at once ---


def refit_all(served: Served, weights: dict[str, Tensor]) -> list[Refitted]:
    """On the server's own event loop."""
    layers = served.engine.layers
    sources = [
        Source(layers[name], partial(quantize_layer, name, w, None), "a folder")
        for name, w in weights.items()
    ]
    work = Refit(served.engine).refit_all(sources)
    return asyncio.run_coroutine_threadsafe(work, served.engine._running_loop).result(60)


def test_layers_are_replaced_together_or_not_at_all() -> None:
    """Guards: half a model that is new because one of its layers could not be read."""
    a, b, x = spread(64, 96) / 2**14, spread(40, 96) / 2**14, spread(2, 96).to(torch.bfloat16)
    with serving(settings(random_layer=("a=64x96", "b=40x96"))) as served, Client(served.url) as client:
        before = {name: client.infer(name, x) for name in "ab"}
        with pytest.raises(WeightsRefused, match=r"Layer 'b' .* the new weight \[41, 96\]"):
            refit_all(served, {"a": a, "b": spread(41, 96)})
        broken = b.clone()
        broken[1, 2] = float("nan")
        with pytest.raises(WeightsRefused, match=r"Layer 'b' keeps version 1: .*nan"):
            refit_all(served, {"a": a, "b": broken})
        for name in "ab":
            assert torch.equal(client.infer(name, x), before[name])
        results = refit_all(served, {"a": a, "b": b})
        assert [(result.layer, result.version) for result in results] == [("a", 2), ("b", 2)]
        for name, w in (("a", a), ("b", b)):
            answer, want = client.call(name, x), reference(x, w)
            assert answer.version == "2"
            assert ((answer.y.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 2**-8
        assert client.layer("b").config["source"] == "a folder"
