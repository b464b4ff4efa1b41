"""A bucket that a backend fails at goes to the next one, aloud; a backend that was named is binding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gemmwire_service import backends
from gemmwire_service.backends.base import LayerSpec, Plan
from gemmwire_service.errors import BackendError
from gemmwire_service.mxfp8.weight import MxWeight
from gemmwire_service.plans import Environment, PlanStore
from gemmwire_service.routes import Router
from http_calls import call, infer, message
from oracle import assert_rows_close, reference, spread
from scripted_backend import Fault, ScriptedBackend
from serving import serving, settings

CPU = torch.device("cpu")
N, K = 130, 96
SPEC = LayerSpec("layer", N, K, bias=False)
WEIGHT = MxWeight.from_float(spread(N, K) / 2**14)
BUCKETS = (1, 8, 64)

Install = Callable[[Fault], ScriptedBackend]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a scripted backend in front of emulation."""

    def scripted(fault: Fault) -> ScriptedBackend:
        backend = ScriptedBackend(fault=fault)
        monkeypatch.setattr(backends, "PRIORITY", ("scripted", "emulation"))
        monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "scripted": lambda: backend})
        return backend

    return scripted


def router(choice: str = "auto") -> Router:
    return Router(CPU, BUCKETS, choice, PlanStore(None, Environment(*"gctufbw")), None)


def raises_from(m: int) -> Fault:
    def fault(plan: Plan, out: Tensor) -> None:
        if plan.bucket >= m:
            raise RuntimeError(f"invalid status at M={plan.bucket}")

    return fault


def doubles_from(m: int) -> Fault:
    def fault(plan: Plan, out: Tensor) -> None:
        if plan.bucket >= m:
            out.mul_(2)

    return fault


@pytest.mark.parametrize("fault", [raises_from(64), doubles_from(64)], ids=["raises", "wrong-value"])
def test_a_failing_bucket_goes_to_the_next_backend_and_is_named(install: Install, fault: Fault) -> None:
    install(fault)
    routes = router().route(SPEC, WEIGHT)
    chosen = {bucket: route.backend.name for bucket, route in routes.by_bucket.items()}
    assert chosen == {1: "scripted", 8: "scripted", 64: "emulation"}
    assert [(each.bucket, each.backend) for each in routes.fallbacks] == [(64, "scripted")]
    assert routes.fallbacks[0].reason
    assert (routes.selection.backend.name, routes.selection.passed_over) == ("scripted", ())


def test_a_backend_that_fails_at_every_bucket_is_passed_over_with_its_reason(install: Install) -> None:
    install(raises_from(1))
    routes = router().route(SPEC, WEIGHT)
    assert {route.backend.name for route in routes.by_bucket.values()} == {"emulation"}
    assert routes.selection.backend.name == "emulation"
    [(name, reason)] = routes.selection.passed_over
    assert name == "scripted"
    assert "invalid status" in reason


def test_a_named_backend_is_binding_at_every_bucket(install: Install) -> None:
    install(raises_from(64))
    with pytest.raises(BackendError, match="invalid status at M=64") as raised:
        router("scripted").route(SPEC, WEIGHT)
    assert "emulation" in str(raised.value), "the way out is named"


def test_a_backend_that_cannot_prepare_the_weight_is_passed_over(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a start that ends where another backend has the memory, or the range."""
    backend = install(raises_from(1 << 20))

    def no_memory(weight: object, device: torch.device) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(backend, "prepare", no_memory)
    routes = router().route(SPEC, WEIGHT)
    assert {route.backend.name for route in routes.by_bucket.values()} == {"emulation"}
    assert "out of memory" in routes.selection.passed_over[0][1]


def test_a_list_of_backends_is_a_preference(install: Install) -> None:
    install(raises_from(64))
    routes = router("scripted,emulation").route(SPEC, WEIGHT)
    assert routes.by_bucket[64].backend.name == "emulation"


def test_the_server_is_ready_says_so_and_answers_right_at_the_failing_buckets(
    install: Install, checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    install(raises_from(256))
    with serving(
        settings(model=(f"m={checkpoint}",), max_bucket=512, cache_dir=str(checkpoint.parent))
    ) as served:
        config = call(served, "GET", "/v2/models/m.plain/config").json
        assert config["backend"] == "scripted"
        assert {each["bucket"] for each in config["fallbacks"]} == {256, 384, 512}
        plans = {each["bucket"]: each["backend"] for each in config["plans"]}
        assert (plans[128], plans[256]) == ("scripted", "emulation")
        for m in (1, 300):
            x = spread(m, 128, seed=m)
            reply = infer(served, "m.plain", *message(x))
            assert_rows_close(reply.tensor, reference(x, weights["plain.weight"]))
            assert reply.json["parameters"]["backend"] == plans[reply.json["parameters"]["bucket"]]


def test_batch_invariance_without_a_kernel_for_it_is_one_fixed_m(
    checkpoint: Path, weights: dict[str, Tensor]
) -> None:
    with serving(settings(model=(f"m={checkpoint}",), batch_invariant=True)) as served:
        x = spread(300, 512, seed=5)
        together = infer(served, "m.wide", *message(x))
        assert together.json["parameters"]["bucket"] == 128
        for start, m in ((0, 1), (3, 7), (200, 100)):
            rows = x[start : start + m]
            alone = infer(served, "m.wide", *message(rows)).tensor
            assert torch.equal(alone, together.tensor[start : start + m]), m
        assert_rows_close(together.tensor, reference(x, weights["wide.weight"], weights["wide.bias"]))


def test_layers_share_the_instance_of_a_backend() -> None:
    """Guards: scratch memory of the size of the largest x for every single layer."""
    shared = router()
    first, second = (shared.route(LayerSpec(name, N, K, bias=False), WEIGHT) for name in "ab")
    assert first.by_bucket[8].backend is second.by_bucket[64].backend
    assert first.selection.backend is second.selection.backend
