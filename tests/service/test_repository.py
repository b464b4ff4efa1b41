"""Models that come and go while a server runs."""

from __future__ import annotations

import gc
import json
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tritonclient.http as triton
from safetensors.torch import save, save_file
from torch import Tensor
from tritonclient.utils import InferenceServerException

import gemmwire
import gemmwire_service.loading as loading
from gemmwire_service.announce import lines
from gemmwire_service.buckets import Ladder
from gemmwire_service.device import Device
from gemmwire_service.loader import Loader
from gemmwire_service.quantize.command import main as quantize
from gemmwire_service.tuning import TUNERS
from http_calls import Reply, call, infer, message
from oracle import assert_same_bits, reference, rounded_once, sparse
from scripted_cuda import machine
from serving import Served, hold, serving, settings, until

K = 64
STEPS = {"step-1": 1, "step-2": 2}


def tensors(seed: int, n: int = 48, k: int = K) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{name}.weight": sparse(n, k, generator) for name in ("up", "down")}


def put(folder: Path, weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_root(path: Path) -> Path:
    """Models in a folder, and one beside it."""
    path.mkdir()
    for name, seed in STEPS.items():
        put(path / name, tensors(seed))
    put(path / "live", tensors(1))
    (path / "empty").mkdir()
    put(path / ".hidden", tensors(3))
    put(path.parent / "secret", tensors(4))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "root")


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that no test changes."""
    path = make_root(tmp_path_factory.mktemp("still") / "root")
    with serving(settings(model_root=str(path), random_layer=("other=32x64",))) as server:
        yield server


@pytest.fixture
def served(root: Path) -> Iterator[Served]:
    with serving(settings(model_root=str(root), random_layer=("other=32x64",))) as server:
        yield server


def change(server: Served, verb: str, name: str, **parameters: Any) -> Reply:
    body = json.dumps({"parameters": parameters}).encode()
    return call(server, "POST", f"/v2/repository/models/{name}/{verb}", body)


def index(server: Served, body: bytes = b"") -> dict[str, tuple[str, str]]:
    entries = call(server, "POST", "/v2/repository/index", body).json
    return {entry["name"]: (entry["state"], entry["reason"]) for entry in entries}


def x_of(m: int, k: int = K) -> Tensor:
    return sparse(m, k, torch.Generator().manual_seed(m)).to(torch.bfloat16)


def answer(weights: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
    return rounded_once(reference(x, weights[f"{layer}.weight"]))


def assert_serves(server: Served, weights: dict[str, Tensor], version: str) -> None:
    for name in ("up", "down"):
        x = x_of(3)
        reply = infer(server, f"live.{name}", *message(x))
        assert reply.status == 200, reply.body
        assert reply.json["model_version"] == version
        assert_same_bits(reply.tensor, answer(weights, name, x))


# --- as a Triton user does it ---


def test_an_unmodified_tritonclient_loads_and_unloads(served: Served) -> None:
    with triton.InferenceServerClient(served.url.removeprefix("http://")) as client:
        assert not client.is_model_ready("live")
        client.load_model("live")
        assert client.is_model_ready("live")
        assert client.is_model_ready("live.up")
        assert client.is_model_ready("live.up", "1")
        states = {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}
        assert (states["live"], states["live.up"], states["step-1"]) == ("READY", "READY", "UNAVAILABLE")
        assert_serves(served, tensors(1), "1")

        client.unload_model("live", unload_dependents=True)
        assert not client.is_model_ready("live")
        assert not client.is_model_ready("live.up")
        with pytest.raises(InferenceServerException, match="No model 'live' is served") as raised:
            client.unload_model("live")
        assert raised.value.status() == "404"
        with pytest.raises(InferenceServerException, match="There is no model 'nowhere' in the model root"):
            client.load_model("nowhere")
        with pytest.raises(InferenceServerException, match="'config' is not offered"):
            client.load_model("live", config="{}")
        with pytest.raises(InferenceServerException, match="is not offered"):
            client.load_model("live", config="{}", files={"file:1/model.safetensors": b"x"})
        assert client.is_server_ready()


def test_the_index_says_what_can_be_loaded_and_why_not(served: Served, root: Path) -> None:
    (root / "broken").mkdir()
    (root / "broken" / "model.safetensors").write_bytes(b"not a header")
    assert change(served, "load", "broken").status == 400
    assert change(served, "load", "live").status == 200
    found = index(served)
    assert set(found) == {"other", "live", "live.up", "live.down", "step-1", "step-2", "empty", "broken"}
    assert found["step-1"] == ("UNAVAILABLE", "not loaded")
    assert found["empty"][1].startswith("its folder holds no .safetensors")
    assert found["broken"][0] == "UNAVAILABLE"
    assert "broken/model.safetensors" in found["broken"][1]
    assert set(index(served, b'{"ready": true}')) == {"other", "live", "live.up", "live.down"}
    assert change(served, "unload", "live").status == 200
    assert index(served)["live"] == ("UNAVAILABLE", "unloaded")
    assert "model_repository" in call(served, "GET", "/v2").json["extensions"]


def test_a_client_lists_layers_and_not_models(served: Served) -> None:
    assert change(served, "load", "live").status == 200
    with gemmwire.Client(served.url) as client:
        assert [layer.name for layer in client.layers()] == ["other", "live.down", "live.up"]


def test_without_a_root_nothing_is_loaded_or_unloaded(checkpoint: Path) -> None:
    with serving(settings(model=(f"m={checkpoint}",))) as server:
        for verb in ("load", "unload", "refit"):
            refused = change(server, verb, "m")
            assert (refused.status, refused.json["code"]) == (400, "model_invalid")
            assert "--model-root" in refused.json["error"]
        assert set(index(server)) == {"m.plain", "m.ragged", "m.one", "m.wide"}
        assert "model_repository" not in call(server, "GET", "/v2").json["extensions"]


def test_a_server_may_start_with_nothing(root: Path) -> None:
    with serving(settings(model_root=str(root))) as server:
        assert call(server, "GET", "/v2/health/ready").status == 200
        assert call(server, "GET", "/v2/models/live.up").json["error"].startswith("There is no layer")
        assert change(server, "load", "live").json["layers"] == ["live.down", "live.up"]
    assert "no layers yet" in lines([], "http://here", 1.0)[0]


# --- names ---

NAMES = [
    "..", ".", "%2e%2e", "%2e", "..%2fsecret", "%2e%2e%2fsecret", "%2e%2e%2f%2e%2e%2fetc", "..%5csecret",
    "%252e%252e%252fsecret", "live%2f..%2f..%2fsecret", "live%2f", "%2fetc", "live%00", ".hidden",
    "%2ehidden", "live%0a", "%ef%bc%8e%ef%bc%8e", "~", "live%20", "-live", "a" * 129, "live;", "$HOME",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("verb", ["load", "unload", "refit"])
def test_no_name_leaves_the_root(still: Served, verb: str, name: str) -> None:
    reply = change(still, verb, name)
    assert reply.status in (400, 404), (name, reply.status)
    assert "secret/model" not in reply.body.decode()
    assert set(still.engine.layers) == {"other"}


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", "live/../../secret", "", "\0", 7, None])
def test_no_source_of_a_refit_leaves_the_root(served: Served, name: object) -> None:
    assert change(served, "load", "live").status == 200
    reply = change(served, "refit", "live", **{"from": name})
    assert reply.status in (400, 404)
    assert_serves(served, tensors(1), "1")


def test_links_lead_within_the_root_only(served: Served, root: Path, tmp_path: Path) -> None:
    (root / "current").symlink_to("step-2")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "self").symlink_to(root)
    (root / "loop").symlink_to(root / "loop")
    (root / "inside").mkdir()
    (root / "inside" / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    for name, linked in (("below", "deep/shard"), ("beside", "deep")):
        (root / name).mkdir()
        weight_map = {"up.weight": "deep/shard/model.safetensors"}
        (root / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (root / name / linked).parent.mkdir(exist_ok=True)
    (root / "below" / "deep" / "shard").symlink_to(tmp_path / "secret")
    (root / "beside" / "deep").symlink_to(root / "below" / "deep")
    assert change(served, "load", "current").status == 200
    for name in ("out", "inside", "below", "beside", "self", "loop"):
        refused = change(served, "load", name)
        assert refused.status in (400, 404), name
        assert str(tmp_path / "secret") not in refused.json["error"]
    found = index(served)
    for name in ("out", "inside", "below", "beside"):
        assert "leads out of the model root" in found[name][1]
    assert "self" in found
    assert "loop" not in found


# --- what happens to what is served ---


def test_loading_again_replaces_a_model_and_counts_on(served: Served, root: Path) -> None:
    assert change(served, "load", "live").status == 200
    put(root / "live", tensors(2, n=80))
    assert change(served, "load", "live").status == 200
    assert_serves(served, tensors(2, n=80), "2")
    assert change(served, "unload", "live").status == 200
    put(root / "live", tensors(1))
    assert change(served, "load", "live").status == 200
    assert_serves(served, tensors(1), "3")  # no version names two weights
    assert call(served, "GET", "/v2/models/live.up/config").json["weight_fidelity"]["rows"] > 0


def test_layers_that_a_new_load_lacks_are_gone(served: Served, root: Path) -> None:
    assert change(served, "load", "live").status == 200
    put(root / "live", {"side.weight": torch.ones(4, 4)})
    assert change(served, "load", "live").json["layers"] == ["live.side"]
    assert infer(served, "live.up", *message(x_of(1))).status == 404


@pytest.mark.parametrize("fault", ["header", "value", "gone"])
def test_a_load_that_fails_leaves_what_was_there(served: Served, root: Path, fault: str) -> None:
    assert change(served, "load", "live").status == 200
    path = root / "live" / "model.safetensors"
    if fault == "header":
        path.write_bytes(b"\xff" * 100)
    elif fault == "value":
        broken = tensors(2)
        broken["up.weight"][3, 5] = torch.nan
        save_file(broken, path)
    else:
        path.unlink()
    before = set(served.engine.layers)
    refused = change(served, "load", "live")
    assert (refused.status, refused.json["code"]) == (400, "model_invalid")
    assert set(served.engine.layers) == before
    assert index(served)["live"][0] == "READY"
    if fault != "gone":
        assert "its 2 layers are served as before" in index(served)["live"][1]
    assert_serves(served, tensors(1), "1")


def test_a_name_that_another_has_is_refused(root: Path) -> None:
    with serving(settings(model_root=str(root), random_layer=("live.up=32x64",))) as server:
        refused = change(server, "load", "live")
        assert refused.status == 400
        assert "would have a layer 'live.up', and there is one from random 32x64" in refused.json["error"]
        assert set(server.engine.layers) == {"live.up"}


def test_a_model_of_the_start_is_loaded_again_and_unloaded_too(root: Path) -> None:
    with serving(settings(model_root=str(root), model=(f"live={root / 'step-2'}",))) as server:
        assert_serves(server, tensors(2), "1")
        assert change(server, "load", "live").status == 200
        assert_serves(server, tensors(1), "2")
        assert change(server, "unload", "live").status == 200
        assert server.engine.layers == {}


def test_unload_answers_what_was_asked_before_and_nothing_after(served: Served) -> None:
    assert change(served, "load", "live").status == 200
    gate, x = threading.Event(), x_of(2)
    hold(served.engine, gate)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(infer, served, "live.up", *message(x)) for _ in range(4)]
        until(lambda: served.engine.waiting == 4, "the requests did not come")
        unloading = pool.submit(change, served, "unload", "live")
        until(lambda: "live.up" not in served.engine.layers, "the layer is still found")
        assert infer(served, "live.up", *message(x)).status == 404
        assert index(served)["live"][0] == "UNLOADING"
        assert not unloading.done()
        gate.set()
        for each in waiting:
            assert_same_bits(each.result().tensor, answer(tensors(1), "up", x))
        assert unloading.result().status == 200


def test_a_request_whose_body_comes_after_its_layer_has_gone_is_answered(served: Served) -> None:
    """Guards: a batch that takes the old layer's requests for the new one's, which has another shape."""
    assert change(served, "load", "live").status == 200
    x = x_of(2)
    body, length = message(x)
    head = (
        f"POST /v2/models/live.up/infer HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n"
        f"Inference-Header-Content-Length: {length}\r\nConnection: close\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as late:
        late.sendall(head + body[:10])
        until(lambda: served.lane.begun == 1, "the head did not come")
        assert change(served, "unload", "live").status == 200
        late.sendall(body[10:])
        received = b"".join(iter(lambda: late.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 200")
    assert received.endswith(bytes(answer(tensors(1), "up", x).view(-1).view(torch.uint8).tolist()))


def test_old_and_new_of_one_name_never_share_a_forward(served: Served, root: Path) -> None:
    assert change(served, "load", "live").status == 200
    gate, old_x, new_x = threading.Event(), x_of(2), x_of(3, 96)
    old_layer = served.engine.layers["live.up"]
    with ThreadPoolExecutor(8) as pool:
        put(root / "live", tensors(2, n=8, k=96))
        assert change(served, "load", "live").status == 200
        new_layer = served.engine.layers["live.up"]
        hold(served.engine, gate)
        served.engine.layers["live.up"] = old_layer
        first = [pool.submit(infer, served, "live.up", *message(old_x)) for _ in range(2)]
        until(lambda: served.engine.waiting == 2, "the requests did not come")
        served.engine.layers["live.up"] = new_layer
        second = [pool.submit(infer, served, "live.up", *message(new_x)) for _ in range(2)]
        until(lambda: served.engine.waiting == 4, "the requests did not come")
        gate.set()
        for each in first:
            assert each.result().json["model_version"] == "1"
            assert_same_bits(each.result().tensor, answer(tensors(1), "up", old_x))
        for each in second:
            assert each.result().json["model_version"] == "2"
            assert_same_bits(each.result().tensor, answer(tensors(2, n=8, k=96), "up", new_x))


def test_under_traffic_every_answer_is_that_of_the_version_it_names(served: Served, root: Path) -> None:
    assert change(served, "load", "live").status == 200
    stop, x = threading.Event(), x_of(5)
    right = [answer(tensors(seed), "up", x) for seed in (1, 2)]
    seen: set[str] = set()

    def ask() -> None:
        while not stop.is_set():
            reply = infer(served, "live.up", *message(x))
            assert reply.status == 200, reply.body
            version = reply.json["model_version"]
            assert_same_bits(reply.tensor, right[(int(version) + 1) % 2])
            seen.add(version)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            for seed in (2, 1, 2, 1, 2):
                put(root / "live", tensors(seed))
                assert change(served, "load", "live").status == 200
        finally:
            stop.set()
        for each in asking:
            each.result()
    assert len(seen) > 1


def test_forwards_go_on_between_the_layers_of_a_load(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, read = threading.Event(), threading.Event(), Loader.read

    def slow(self: Loader, model: Any, name: str, device: torch.device) -> Any:
        if name == "up":
            reached.set()
            assert gate.wait(30)
        return read(self, model, name, device)

    monkeypatch.setattr(Loader, "read", slow)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(change, served, "load", "live")
        assert reached.wait(30)
        for m in (1, 3, 300):
            assert infer(served, "other", *message(x_of(m))).status == 200
        assert call(served, "GET", "/v2/health/ready").status == 200
        assert index(served)["live"] == ("LOADING", "not loaded")
        assert infer(served, "live.down", *message(x_of(1))).status == 404  # all of it or nothing
        gate.set()
        assert loading.result().status == 200
    assert_serves(served, tensors(1), "1")


class OneAtATime:
    """A tuner as a kernel library's: neither context nests in the other, and forwards want serving."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.tuned = 0

    @contextmanager
    def _enter(self, what: str) -> Iterator[None]:
        assert self.inside == []
        self.inside.append(what)
        try:
            yield
        finally:
            self.inside.pop()

    def tuning(self) -> AbstractContextManager[None]:
        self.tuned += 1
        return self._enter("tuning")

    def serving(self) -> AbstractContextManager[None]:
        return self._enter("serving")


def test_a_load_tunes_outside_of_what_serves_and_serving_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = OneAtATime()
    monkeypatch.setitem(TUNERS, "emulation_e4m3", lambda folder, buckets: tuner)
    options = settings(model_root=str(root), backend="emulation_e4m3", max_bucket=4)
    with serving(options) as server:
        for tuned in (1, 2):
            assert change(server, "load", "live").status == 200
            assert tuner.inside == ["serving"]
            assert tuner.tuned >= 2 * tuned
        (root / "step-2" / "model.safetensors").write_bytes(b"no header")
        assert change(server, "load", "step-2").status == 400
        assert tuner.inside == ["serving"]
        assert_serves(server, tensors(1), "2")
    assert tuner.inside == []


@pytest.mark.parametrize("mail", [False, True], ids=["copied", "mailed"])
def test_a_device_with_graphs_captures_them_at_load_and_drops_them_at_unload(
    root: Path, monkeypatch: pytest.MonkeyPatch, mail: bool
) -> None:
    """On a scripted device; guards pinned memory that is too small for a layer wider than those before it."""
    ladder = Ladder.up_to(8)
    made = machine(ladder, budget=1 << 30, mail=mail, bytes_each=100, took=20.0)
    monkeypatch.setattr(loading, "Device", partial(Device, machine=lambda: made))
    put(root / "live", tensors(1, n=300, k=288))
    x = x_of(3, 288)
    with serving(settings(model_root=str(root), random_layer=("other=32x64",), max_bucket=8)) as server:
        before = made.graphs.used
        for version in ("1", "2"):
            assert change(server, "load", "live").status == 200
            layer = server.engine.layers["live.up"]
            assert all(layer.has_graph(bucket) for bucket in ladder.buckets)
            reply = infer(server, "live.up", *message(x))
            assert reply.json["model_version"] == version
            assert_same_bits(reply.tensor, answer(tensors(1, n=300, k=288), "up", x))
            assert infer(server, "other", *message(x_of(20))).status == 200
        assert made.graphs.used == 3 * before
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(infer, server, "live.up", *message(x)) for _ in range(16)]
            assert change(server, "unload", "live").status == 200
            assert {each.result().status for each in asked} <= {200, 404}
        assert made.graphs.used == before
        assert layer.graph_count == 0  # one that came late may have been answered since, without a graph


def test_nothing_holds_a_model_that_was_unloaded_or_replaced(served: Served, root: Path) -> None:
    gone: list[weakref.ref[Any]] = []

    def watch() -> None:
        for name in ("live.up", "live.down"):
            layer = served.engine.layers[name]
            gone.append(weakref.ref(layer))
            gone.extend(weakref.ref(route.weight) for route in layer.routes.by_bucket.values())

    assert change(served, "load", "live").status == 200
    assert_serves(served, tensors(1), "1")
    watch()
    assert change(served, "load", "live").status == 200
    assert_serves(served, tensors(1), "2")
    watch()
    (root / "live" / "model.safetensors").write_bytes(b"no header")
    assert change(served, "load", "live").status == 400
    assert change(served, "unload", "live").status == 200
    until(lambda: gc.collect() >= 0 and not any(each() for each in gone), "an old weight is still held")


# --- refit of a whole model ---


def test_a_model_is_refitted_from_a_folder(served: Served) -> None:
    assert change(served, "load", "live").status == 200
    storage = {name: id(layer) for name, layer in served.engine.layers.items()}
    done = change(served, "refit", "live", **{"from": "step-2"})
    assert done.status == 200, done.body
    assert (done.json["name"], done.json["source"]) == ("live", "step-2")
    assert {each["name"]: each["version"] for each in done.json["layers"]} == {
        "live.down": "2",
        "live.up": "2",
    }
    assert_serves(served, tensors(2), "2")
    assert {name: id(layer) for name, layer in served.engine.layers.items()} == storage
    assert call(served, "GET", "/v2/models/live.up/config").json["source"].endswith("root/step-2")


def test_without_a_source_the_model_is_refitted_from_its_own_folder(served: Served, root: Path) -> None:
    assert change(served, "load", "live").status == 200
    put(root / "live", tensors(2))
    assert change(served, "refit", "live").status == 200
    assert_serves(served, tensors(2), "2")


def test_a_refit_fills_no_cache_and_is_held_against_no_older_model(root: Path, tmp_path: Path) -> None:
    """Guards: every step of a training run kept on disk; new weights refused for not being the first."""
    assert quantize([str(root / "step-1"), str(root / "first")]) == 0
    assert quantize([str(root / "step-2"), str(root / "second")]) == 0
    cache = tmp_path / "cache"
    options = settings(
        model_root=str(root),
        model=(f"live={root / 'first'}", f"float={root / 'step-1'}"),
        reference=(f"live={root / 'step-1'}",),
        weight_cache=str(cache),
    )
    with serving(options) as server:
        assert_serves(server, tensors(1), "1")
        kept = len(list((cache / "weights").iterdir()))
        assert change(server, "refit", "float", **{"from": "step-2"}).status == 200
        assert len(list((cache / "weights").iterdir())) == kept == 2
        assert change(server, "refit", "live", **{"from": "second"}).status == 200
        assert_serves(server, tensors(2), "2")


@pytest.mark.parametrize("fault", ["value", "shape", "missing", "more", "broken"])
def test_a_refit_that_is_refused_changes_no_layer(served: Served, root: Path, fault: str) -> None:
    """Whichever layer is at fault; guards one that is changed before the last has been looked at."""
    assert change(served, "load", "live").status == 200
    for name in ("up", "down"):
        bad = tensors(2)
        if fault == "value":
            bad[f"{name}.weight"][0, 0] = torch.inf
        elif fault == "shape":
            bad[f"{name}.weight"] = bad[f"{name}.weight"][:-1].clone()
        elif fault == "missing":
            del bad[f"{name}.weight"]
        elif fault == "more":
            bad["more.weight"] = torch.ones(4, 4)
        put(root / "bad", bad)
        if fault == "broken":
            (root / "bad" / "model.safetensors").write_bytes(b"\0" * 7)
        refused = change(served, "refit", "live", **{"from": "bad"})
        assert refused.status == 400
        assert refused.json["code"] == ("model_invalid" if fault == "broken" else "weights_invalid")
        assert ("replace them one by one" in refused.json["error"]) == (fault in ("missing", "more"))
        assert_serves(served, tensors(1), "1")


def test_if_match_is_the_version_of_every_layer(served: Served) -> None:
    def refit(version: str) -> Reply:
        path, body = "/v2/repository/models/live/refit", b'{"parameters": {"from": "step-2"}}'
        return call(served, "POST", path, body, {"If-Match": version})

    assert change(served, "load", "live").status == 200
    assert refit("2").status == 409
    assert_serves(served, tensors(1), "1")
    assert refit('"1"').status == 200
    body = save({"weight": tensors(2)["up.weight"]})
    assert call(served, "PUT", "/v2/repository/models/live.up/weights", body).status == 200
    refused = refit("2")  # live.up is in version 3
    assert (refused.status, refused.json["code"]) == (409, "version_conflict")
    assert call(served, "GET", "/v2/models/live.down").json["versions"] == ["2"]


def test_what_is_not_served_is_not_refitted(served: Served) -> None:
    refused = change(served, "refit", "live", **{"from": "step-1"})
    assert (refused.status, refused.json["code"]) == (404, "model_unknown")
    assert change(served, "refit", "other", **{"from": "step-1"}).status == 404
    assert change(served, "refit", "live", source="step-1").json["code"] == "request_invalid"


def test_a_refit_of_a_layer_that_was_loaded_again_meanwhile_is_a_conflict(served: Served) -> None:
    """Guards: new weights into a layer that no request finds any more, and a 200 for it."""
    assert change(served, "load", "live").status == 200
    body = save({"weight": tensors(2)["up.weight"]})
    head = (
        "PUT /v2/repository/models/live.up/weights HTTP/1.1\r\nHost: h\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    gate = threading.Event()
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as late:
        late.sendall(head + body[:-1])
        hold(served.engine, gate)  # and so the request has been seen by the time that the next one is
        gate.set()
        assert change(served, "load", "live").status == 200
        late.sendall(body[-1:])
        received = b"".join(iter(lambda: late.recv(65536), b""))
    assert received.startswith(b"HTTP/1.1 409")
    assert_serves(served, tensors(1), "2")
